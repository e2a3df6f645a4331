"""One training step of span predictors on a frozen Hugging Face model: distillation from the model without expiry, under a
budget.

    loss = KL(base model || with expiry) + weight x mean span

What the contexts are, and which of their tokens weigh more, the mixture says (mixture.py). The budget controller sets the
weight of the span loss. Contexts are read in blocks. The memory of earlier blocks is carried, and its spans still
get gradients (hf/learning.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from expire_span.errors import UserError
from expire_span.hf.calibration import fit, mean_slope, observe
from expire_span.hf.learning import LearningLayer
from expire_span.hf.retrofitted import Retrofit
from expire_span.ops.rule import is_alive
from expire_span.settings.retrofit import DistillConfig

from .lessons import Passages, Text
from .levels import Level, build_levels
from .mixture import Contexts, Mixture, build_mixture

LEAST_RATE = 0.05
"""Final learning rate as a share of the peak."""


class Distiller:
    """The span predictors, their optimizer, the budget controller and the random choice of contexts."""

    def __init__(
        self,
        retrofitted: Retrofit,
        documents: list[Tensor],
        config: DistillConfig,
        seed: int = 0,
        tell: Callable[[str], None] | None = None,
        tokenizer: Any = None,
    ) -> None:
        """tell: called with a sentence when something begins that takes long and is no training step.

        tokenizer: of the model; mixtures of more than text need it.
        """
        if not retrofitted.predictors:
            raise ValueError(
                f"every layer of {type(retrofitted.model).__name__} has a window of its own: nothing can be learned"
            )
        self.retrofitted, self.config, self.model = retrofitted, config, retrofitted.model
        self.begins = () if retrofitted.beginning is None else retrofitted.beginning.context
        """The tokens that every context begins with."""
        _check_context(retrofitted, documents, config.context, len(self.begins))
        long_enough = [x for x in documents if len(x) >= config.context - len(self.begins)]
        self.documents, self.kept_apart = split_documents(long_enough, config.context - len(self.begins))
        self.device = next(retrofitted.model.parameters()).device
        self.levels = build_levels(retrofitted, config, self.device)
        self.choose(0)
        self.optimizer = _build_optimizer(retrofitted, config, self.levels)
        self.rng, self.seed = numpy.random.default_rng(seed), seed
        self.calibrated = config.calibrate == 0
        self.taken = 0
        """Optimizer steps so far. Where a time limit moves the schedule, its place skips steps; budgets take turns by this."""
        self.tell = tell or (lambda sentence: None)
        self.mixture = build_mixture(self.documents, config, retrofitted.beginning, tokenizer, self.device, seed)

    def choose(self, number: int) -> None:
        """Go on with one of the budgets."""
        self.level = self.levels[number]
        self.retrofitted.predictors = self.level.predictors
        self.target, self.controller = self.level.target, self.level.controller

    def step(self, step: int, share: float | None = None) -> dict[str, Any]:
        """One optimizer step over a batch of whole contexts, read block by block; several budgets take turns.

        share: share of the training that is done before it, for schedules; None takes it from `step`.
        """
        began = time.perf_counter()
        self.mixture.prepare(self.retrofitted, self.tell)
        if not self.calibrated:
            self.calibrate()
            self.calibrated = True
            self.tell("spans are fitted; the first step")
        self.choose(self.taken % len(self.levels))
        share = step / self.config.steps if share is None else share
        self.controller.target = self.target_at(share)
        self.set_rate(share)
        weight = self.controller.weight
        divergence, spans, live = self.read(self._contexts(), weight)
        norm = torch.nn.utils.clip_grad_norm_(self.retrofitted.parameters(), self.config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.taken += 1
        self.controller.update(live.mean(), divergence)
        line = dict(step=step + 1, kl=divergence.item(), live=live.mean().item(), goal=self.controller.target)
        line |= dict(span=spans.mean().item(), weight=weight.item(), norm=norm.item())
        line |= dict(live_of_layers=live.tolist(), span_of_layers=spans.tolist())
        return {**line, "seconds": time.perf_counter() - began}

    def calibrate(self) -> None:
        """Set the predictors to spans that meet the budget and follow the base model's attention, and set the initial weight.

        At that weight of the span loss, shortening all spans by the same factor would save as much as it costs in divergence.
        """
        rows: list[Contexts] = []
        while len(rows) < self.config.calibrate:
            rows += self._contexts().split(1)
        self.tell(
            f"fitting spans to the model's attention over {self.config.calibrate} contexts, before the first step"
        )
        found = observe(self.retrofitted, [(x.ids, x.weights) for x in rows[: self.config.calibrate]])
        for number in range(len(self.levels)):
            self.choose(number)
            fit(self.retrofitted, found, self.config.context, self.target)
            self._start_control(mean_slope(self.retrofitted, found))

    def _start_control(self, slope: float) -> None:
        self.read(self._contexts(), torch.zeros((), device=self.device))
        biases = [p.grad for name, p in self.retrofitted.predictors.named_parameters() if name.endswith("bias")]
        gain = -sum(float(x.sum()) for x in biases if x is not None)
        self.optimizer.zero_grad(set_to_none=True)
        if gain > 0:
            self.controller.start_from(gain / slope)

    def read(self, contexts: Contexts, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Read contexts: the KL divergence from the base model (nats per token, the weighted mean), the mean span in steps, and
        the living memories of each layer.

        weight: of the span loss; gradients are then accumulated block by block. None computes no gradients.
        """
        cache, teacher = self.retrofitted.new_cache(learning=True), DynamicCache(config=self.model.config)
        divergence, spans, living = torch.zeros((), device=self.device), 0.0, []
        length = contexts.ids.shape[1]
        for block in contexts.blocks(self.config.block):
            part = block.ids.shape[1] / length
            with torch.no_grad(), self.retrofitted.paused():
                wanted = self.model(block.ids, past_key_values=teacher, use_cache=True).logits
            for layer in _learning(cache):
                layer.marks = block.marks
            given = self.model(block.ids, past_key_values=cache, use_cache=True).logits
            loss, span = kl_divergence(wanted, given, block.weights), self._new_spans(cache, block.ids.shape[1])
            del wanted, given
            if weight is not None:
                ((loss + weight * self._price(span, cache, length)) * part).backward()
            divergence = divergence + loss.detach() * part
            spans = spans + span.detach().mean((1, 2, 3)) * part
            if cache.seen >= self.config.budget_from * length:
                living.append(self._live(cache) * (length / cache.seen))
        return divergence, torch.as_tensor(spans), torch.stack(living).log().mean(0).exp()

    @torch.no_grad()
    def evaluate(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same for contexts of the held-out text, always the same ones."""
        held_out = Text(Passages(self.kept_apart), self.config.context, self.begins)
        return self._judge(Mixture({"text": (1.0, held_out)}), numpy.random.default_rng([self.seed, 1]))

    @torch.no_grad()
    def evaluate_mixture(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same for contexts of the mixture that no step draws, always the same ones."""
        return self._judge(self.mixture, numpy.random.default_rng([self.seed, 2]))

    def _judge(self, mixture: Mixture, rng: numpy.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for first in range(0, self.config.eval_contexts, self.config.batch):
            rows = min(self.config.batch, self.config.eval_contexts - first)
            found.append(self.read(mixture.draw(rows, rng, self.device)))
        kl, spans, live = (torch.stack(x).mean(0) for x in zip(*found))
        return kl, spans, live

    def target_at(self, share: float) -> float:
        """The budget after a share of the training: it falls geometrically from the whole context to the target,
        which it reaches after `config.anneal` of the training.

        With calibrated spans it is the target from the beginning.
        """
        done = 1.0 if self.config.calibrate else min(1.0, share / max(1e-9, self.config.anneal))
        return self.config.context ** (1 - done) * self.target**done

    def set_rate(self, share: float) -> None:
        """The learning rate after a share of the training: constant, then linear decay."""
        left = min(1.0, (1 - share) / max(1e-9, self.config.decay))
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * max(left, LEAST_RATE)

    def _contexts(self) -> Contexts:
        return self.mixture.draw(self.config.batch, self.rng, self.device)

    def _new_spans(self, cache: Any, count: int) -> Tensor:
        """Spans of the last `count` tokens in all layers that learn, [layers, B, Hkv, count].

        Tokens that are kept for ever count as max_span.
        """
        longest = self.retrofitted.config.max_span
        return torch.stack([layer.last.span[..., -count:].clamp_max(longest) for layer in _learning(cache)])

    def _price(self, span: Tensor, cache: Any, context: int) -> Tensor:
        """The span loss: the mean span, where each calibrated span counts only up to the end of the context.

        No query reads a memory beyond the context, so the task gives no gradient for that part of a span. If it counted, long
        spans would be shortened more than short ones. Without calibration all spans start beyond the context, and that part
        must count, so that they get shorter at all.
        """
        if not self.config.calibrate:
            return span.mean()
        count = span.shape[-1]
        rest = torch.arange(context - cache.seen + count - 1, context - cache.seen - 1, -1, device=span.device)
        return torch.minimum(span, rest.to(span.dtype)).mean()

    @torch.no_grad()
    def _live(self, cache: Any) -> Tensor:
        """Number of living memories after the last token read, the mean over rows and heads, for each layer that learns."""
        counts = []
        for layer in _learning(cache):
            age = layer.seen - 1 - layer.last.k_pos
            counts.append(is_alive(layer.last.span - age.unsqueeze(1), layer.ramp).sum(-1).float().mean())
        return torch.stack(counts)

    # State that checkpoints hold

    def weights(self) -> dict[str, Tensor]:
        self.choose(0)
        return {name: x for level in self.levels for name, x in level.weights(self.retrofitted).items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain values: the controller, the choice of contexts, and whether spans have been calibrated."""
        about: dict[str, Any] = {"controller": self.levels[0].controller.state_dict()}
        about |= {"controllers": [level.controller.state_dict() for level in self.levels[1:]]}
        about["rng"] = self.rng.bit_generator.state
        return about | {"calibrated": self.calibrated, "written": self.mixture.to_state()}

    def moments(self) -> dict[str, Any]:
        """The optimizer's state (Adam's running means), by the index of the weight."""
        return {str(n): {k: _on_host(v) for k, v in x.items()} for n, x in self.optimizer.state_dict()["state"].items()}

    def load(self, weights: dict[str, Tensor], state: dict[str, Any], moments: dict[str, Any]) -> None:
        self.choose(0)
        for level, known in zip(self.levels, [state["controller"], *state["controllers"]]):
            level.load(self.retrofitted, weights)
            level.controller.load_state_dict(known)
        self.rng.bit_generator.state = state["rng"]
        self.mixture.load_state(state["written"])
        self.calibrated = state["calibrated"]
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": {int(n): x for n, x in moments.items()}, "param_groups": groups})


def _check_context(retrofitted: Retrofit, documents: list[Tensor], context: int, begins: int) -> None:
    """Refuse a context that no document fills behind the `begins` tokens that come first, or that the model has no positions
    for."""
    longest = max((len(x) for x in documents), default=0) + begins
    if longest < context:
        raise UserError(
            f"no document has a context of {context} tokens, the longest has {longest}; give a shorter --context or more text"
        )
    table = retrofitted.length
    if table is not None and context > table:
        kind = type(retrofitted.model).__name__
        raise UserError(
            f"{kind} has a learned table of {table} positions, got a context of {context} tokens; give a shorter one"
        )


def _build_optimizer(retrofitted: Retrofit, config: DistillConfig, levels: list[Level]) -> torch.optim.Adam:
    """Adam with separate learning rates for the predictors' weights, their biases, and the LoRA weights. A step changes only
    what has gradients: the predictors of one budget."""
    rate = config.lr or 0.5 / retrofitted.layers[0].dim
    rates = {"weight": rate, "bias": max(rate, config.bias_lr)}
    named = [(name.rpartition(".")[2], p) for level in levels for name, p in level.predictors.named_parameters()]
    groups = [{"params": [p for n, p in named if n == kind], "lr": x, "peak": x} for kind, x in rates.items()]
    if retrofitted.lora:
        groups.append({"params": retrofitted.lora, "lr": config.lora_lr, "peak": config.lora_lr})
    return torch.optim.Adam(groups, betas=(0.9, 0.95))


def split_documents(documents: list[Tensor], context: int) -> tuple[list[Tensor], list[Tensor]]:
    """Training text and held-out text: the latter is the last document, or the end of the only one.

    A single document shorter than two contexts is used for both.
    """
    if len(documents) > 1:
        return documents[:-1], documents[-1:]
    only = documents[0]
    return ([only[:-context]], [only[-context:]]) if len(only) >= 2 * context else (documents, documents)


def _learning(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if isinstance(layer, LearningLayer)]


def _on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def kl_divergence(wanted: Tensor, given: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean over tokens of weight x KL(wanted || given) in nats; logits [B, T, V], weights [B, T] or all 1, gradients to `given`
    only."""
    weights = torch.ones(wanted.shape[:-1], device=wanted.device) if weights is None else weights
    return _Divergence.apply(wanted.flatten(0, -2), given.flatten(0, -2), weights.flatten())  # type: ignore[return-value]


class _Divergence(torch.autograd.Function):
    """KL divergence whose forward pass also computes the gradient, in chunks of tokens, so that there are never float32 copies
    of all logits at once."""

    TOKENS = 1024

    @staticmethod
    def forward(ctx: Any, wanted: Tensor, given: Tensor, weights: Tensor) -> Tensor:
        total, grad = torch.zeros((), device=given.device), torch.empty_like(given)
        for n in range(0, len(given), _Divergence.TOKENS):
            rows = slice(n, n + _Divergence.TOKENS)
            teacher, student = (F.log_softmax(x[rows].float(), -1) for x in (wanted, given))
            chances, weight = teacher.exp(), weights[rows].unsqueeze(1)
            total += (weight * chances * (teacher - student)).sum()
            grad[rows] = weight * (student.exp() - chances) / len(given)
        ctx.save_for_backward(grad)
        return total / len(given)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[None, Tensor, None]:
        (grad,) = ctx.saved_tensors
        return None, grad * above[0], None
