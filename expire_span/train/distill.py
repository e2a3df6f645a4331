"""Learning to forget on a frozen Hugging Face model: its own logits are the teacher, the budget controller the pressure.

    loss = KL(base model || with expiry) + weight x mean span,   weight by the controller, so that the living fit the budget

Contexts are read in blocks; the memory of earlier blocks is carried and its spans learn on (hf/learning.py). The run folder:

    config.json             settings and versions
    metrics.jsonl           a line for each step
    checkpoint.safetensors  predictors, optimizer, controller, generator of contexts; replaced at once
    adapter/                what was learned, at the end
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from expire_span import __version__
from expire_span.config import BudgetConfig
from expire_span.errors import UserError
from expire_span.files import to_json, write_atomic
from expire_span.hf.handle import Retrofit
from expire_span.hf.learning import LearningLayer
from expire_span.hf.settings import DistillConfig
from expire_span.models.state import pack, unpack

from .budget import BudgetController

Progress = Callable[[dict[str, Any]], None]
LEAST_RATE = 0.05
"""Share of the learning rate that is left at the end."""


def distill(
    handle: Retrofit, documents: list[Tensor], config: DistillConfig, folder: Path, progress: Progress | None = None
) -> dict[str, Any]:
    """Train the predictors of a retrofitted model on token documents [n]; goes on where an interrupted run stopped."""
    learner = Learner(handle, documents, config)
    _open_folder(folder, learner)
    start = learner.load(folder / "checkpoint.safetensors")
    frozen = [(p, p.requires_grad) for p in handle.model.parameters()]
    training = handle.model.training
    try:
        handle.model.eval().requires_grad_(False)
        for step in range(start, config.steps):
            line = learner.step(step)
            _append(folder / "metrics.jsonl", line)
            if progress is not None:
                progress(line)
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps:
                learner.save(folder / "checkpoint.safetensors", step + 1)
    finally:
        handle.model.train(training)
        for parameter, flag in frozen:
            parameter.requires_grad_(flag)
    handle.save(folder / "adapter")
    result = {**_last_steps(folder), "target": learner.target, "context": config.context, "steps": config.steps}
    write_atomic(folder / "result.json", to_json(result))
    return result


class Learner:
    """The predictors, their optimizer, the controller and the choice of contexts."""

    def __init__(self, handle: Retrofit, documents: list[Tensor], config: DistillConfig) -> None:
        if not handle.predictors:
            raise ValueError(
                f"every layer of {type(handle.model).__name__} has a window of its own: nothing can be learned"
            )
        self.handle, self.config, self.model = handle, config, handle.model
        self.documents = [x for x in documents if len(x) >= config.context]
        if not self.documents:
            longest = max((len(x) for x in documents), default=0)
            raise UserError(f"no document has a context of {config.context} tokens, the longest has {longest}")
        self.target = config.target(handle.config.ramp, handle.bytes_per_token)
        self.device = next(handle.model.parameters()).device
        budget = BudgetConfig(live=self.target, initial_weight=config.initial_weight, gain=config.gain, max_weight=1.0)
        self.controller = BudgetController(budget, layers=1, bytes_per_memory=1, device=self.device)
        self.rate = config.lr or 0.5 / handle.layers[0].dim
        self.optimizer = torch.optim.Adam(list(handle.parameters()), lr=self.rate, betas=(0.9, 0.95))
        self.rng = numpy.random.default_rng(config.seed)

    def step(self, step: int, share: float | None = None) -> dict[str, Any]:
        """One optimizer step over a batch of whole contexts, block by block; `share` of the training is done before it."""
        began = time.perf_counter()
        share = step / self.config.steps if share is None else share
        self.controller.target = self.target_at(share)
        self.set_rate(share)
        weight = self.controller.weight
        ids, cache = self._contexts(), self.handle.new_cache(learning=True)
        teacher = DynamicCache(config=self.model.config)
        divergence, spans = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        living = []
        for block in ids.split(self.config.block, dim=1):
            part = block.shape[1] / ids.shape[1]
            with torch.no_grad(), self.handle.paused():
                wanted = self.model(block, past_key_values=teacher, use_cache=True).logits
            given = self.model(block, past_key_values=cache, use_cache=True).logits
            loss, span = kl_divergence(wanted, given), self._mean_span(cache, block.shape[1])
            del wanted, given
            ((loss + weight * span) * part).backward()
            divergence += loss.detach() * part
            spans += span.detach() * part
            if cache.seen >= self.config.budget_from * ids.shape[1]:
                living.append(self._live(cache) * (ids.shape[1] / cache.seen))
        live = torch.stack(living).log().mean().exp()
        norm = torch.nn.utils.clip_grad_norm_(self.handle.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.controller.update(live, divergence)
        line = dict(
            step=step + 1, kl=divergence.item(), live=live.item(), goal=self.controller.target, span=spans.item()
        )
        return {**line, "weight": weight.item(), "norm": norm.item(), "seconds": time.perf_counter() - began}

    def target_at(self, share: float) -> float:
        """The budget after a share of the training: from the whole context to the target in equal ratios, then the target."""
        done = min(1.0, share / max(1e-9, self.config.anneal))
        return self.config.context ** (1 - done) * self.target**done

    def set_rate(self, share: float) -> None:
        """The learning rate after a share of the training: constant, then falling in a line."""
        left = min(1.0, (1 - share) / max(1e-9, self.config.decay))
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * max(left, LEAST_RATE)

    def _contexts(self) -> Tensor:
        length = self.config.context
        rows = []
        places = numpy.array([len(x) - length + 1 for x in self.documents], dtype=float)
        for _ in range(self.config.batch):
            document = self.documents[self.rng.choice(len(places), p=places / places.sum())]
            start = int(self.rng.integers(len(document) - length + 1))
            rows.append(document[start : start + length])
        return torch.stack(rows).to(self.device)

    def _mean_span(self, cache: Any, count: int) -> Tensor:
        return torch.stack([layer.last.span[..., -count:].mean() for layer in _learning(cache)]).mean()

    @torch.no_grad()
    def _live(self, cache: Any) -> Tensor:
        """Living memories per head at the end of the context, the mean over rows, heads and layers."""
        counts = []
        for layer in _learning(cache):
            age = layer.seen - 1 - layer.last.k_pos
            counts.append((layer.last.span + layer.ramp > age.unsqueeze(1)).sum(-1).float().mean())
        return torch.stack(counts).mean()

    def save(self, path: Path, step: int) -> None:
        optimizer = self.optimizer.state_dict()
        state = {
            "step": step,
            "predictors": self.handle.predictors.state_dict(),
            "optimizer": {str(k): v for k, v in optimizer["state"].items()},
            "controller": self.controller.state_dict(),
            "rng": self.rng.bit_generator.state,
        }
        tensors, skeleton = pack(state)
        tensors = {name: x.cpu() for name, x in tensors.items()}
        write_atomic(path, safetensors.torch.save(tensors, {"skeleton": json.dumps(skeleton)}))

    def load(self, path: Path) -> int:
        """The step to go on with; 0 where there is no checkpoint."""
        if not path.exists():
            return 0
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            state = unpack(tensors, json.loads(file.metadata()["skeleton"]))
        self.handle.predictors.load_state_dict(state["predictors"])
        groups = self.optimizer.state_dict()["param_groups"]
        moments = {int(k): v for k, v in state["optimizer"].items()}
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.controller.load_state_dict(state["controller"])
        self.rng.bit_generator.state = state["rng"]
        return state["step"]


def _learning(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LearningLayer)]


def kl_divergence(wanted: Tensor, given: Tensor) -> Tensor:
    """Mean over tokens of KL(wanted || given) in nats; logits [B, T, V], gradients to `given` only."""
    return _Divergence.apply(wanted.flatten(0, -2), given.flatten(0, -2))  # type: ignore[return-value]


class _Divergence(torch.autograd.Function):
    """The gradient is computed with the value, some tokens at a time: float32 copies of all logits would not fit."""

    TOKENS = 1024

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, given: Tensor) -> Tensor:
        total, grad = torch.zeros((), device=given.device), torch.empty_like(given)
        for n in range(0, len(given), _Divergence.TOKENS):
            rows = slice(n, n + _Divergence.TOKENS)
            teacher, student = (F.log_softmax(x[rows].float(), -1) for x in (wanted, given))
            chances = teacher.exp()
            total += (chances * (teacher - student)).sum()
            grad[rows] = (student.exp() - chances) / len(given)
        ctx.save_for_backward(grad)
        return total / len(given)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[None, Tensor]:
        (grad,) = ctx.saved_tensors
        return None, grad * above[0]


def _open_folder(folder: Path, learner: Learner) -> None:
    """Write the settings, or check that a folder to go on with has the same; metrics after its checkpoint are dropped."""
    head = {"version": __version__, "retrofit": asdict(learner.handle.config), "distill": asdict(learner.config)}
    path = folder / "config.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, to_json(head))
        return
    before = json.loads(path.read_bytes())
    for part in ("retrofit", "distill"):
        for name, value in head[part].items():
            if before[part].get(name) != value:
                was = before[part].get(name)
                raise UserError(f"{folder} was begun with {name} {was}, got {value}; name another folder to begin anew")
    _forget_after(folder)


def _forget_after(folder: Path) -> None:
    metrics, checkpoint = folder / "metrics.jsonl", folder / "checkpoint.safetensors"
    if metrics.exists():
        step = 0
        if checkpoint.exists():
            with safetensors.safe_open(checkpoint, framework="pt") as file:
                step = json.loads(file.metadata()["skeleton"])["dict"]["step"]["value"]
        lines = [line for line in metrics.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        write_atomic(metrics, b"".join(line for line in lines if json.loads(line)["step"] <= step))


def _append(path: Path, line: dict[str, Any]) -> None:
    with open(path, "ab") as file:
        file.write(json.dumps(line).encode() + b"\n")


def _last_steps(folder: Path, count: int = 10) -> dict[str, float]:
    """Means of the last steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-count:]
    return {name: sum(line[name] for line in lines) / len(lines) for name in ("kl", "live", "span")}
