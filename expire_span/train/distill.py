"""Training a retrofit's span predictors as a run: a `Distiller` (distiller.py) in a run folder, with the shared loop (loop.py).

The folder holds what every run folder holds and, at the end, `adapter/`: the learned weights, ready for `load_adapter`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expire_span.checkpoint import Snapshot
from expire_span.extras import install_command
from expire_span.hf.adapter import base_hash
from expire_span.hf.layouts import text_config
from expire_span.hf.loading import check_context, open_model, read_documents
from expire_span.hf.retrofitted import Retrofit, retrofit
from expire_span.hf.texts import check_vocabulary, describe_beginning, find_beginning, join_short
from expire_span.ops import resolve_impl
from expire_span.runs import RunFolder, UserError
from expire_span.settings.retrofit import BaseModel, DistillConfig, RetrofitConfig, RetrofitTask
from expire_span.settings.run import RetrofitRunConfig, RunConfig

from . import session
from .devices import build_accelerator, check_device
from .distiller import Distiller
from .estimate import check_retrofit_batch
from .loop import Fault
from .progress import Heartbeat
from .trackers import check_tracker


def distill(
    retrofitted: Retrofit,
    documents: list[Tensor],
    config: DistillConfig,
    folder: Path,
    *,
    seed: int = 0,
    shown: bool = False,
    tokenizer: Any = None,
) -> RunFolder:
    """Train a retrofitted model's span predictors on documents (tensors of tokens [n]), in a new run folder.

    tokenizer: the model's; mixtures of more than text need it.
    """
    task = RetrofitTask(model=getattr(retrofitted.model, "name_or_path", "") or "")
    learner = DistillLearner(retrofitted, documents, describe_run(retrofitted, task, config, seed), folder, tokenizer)
    return _run(learner, lambda: session.begin(learner, learner.config, folder, recipe="retrofit", shown=shown))


def distill_on(
    retrofitted: Retrofit, documents: list[Tensor], run: RunFolder, *, shown: bool = False, tokenizer: Any = None
) -> RunFolder:
    """Continue an interrupted run of `distill`, given the same model, documents and tokenizer."""
    learner = DistillLearner(retrofitted, documents, run.config, run.path, tokenizer)
    return _run(learner, lambda: session.go_on(lambda _: learner, run, shown=shown))


def begin(task: RetrofitTask, expiry: RetrofitConfig, config: DistillConfig, folder: Path, *, seed: int) -> RunFolder:
    """A new run of the command line, which names the model and the text."""
    with Heartbeat("retrofit") as beat:
        retrofitted, documents, tokenizer = _open(task, expiry, config, beat)
        described = describe_run(retrofitted, task, config, seed)
        learner = DistillLearner(retrofitted, documents, described, folder, tokenizer, beat)
        return _run(learner, lambda: session.begin(learner, learner.config, folder, recipe="retrofit"))


def resume(run: RunFolder, *, allow_changed_data: bool = False) -> RunFolder:
    """Continue an interrupted run of the command line; its model and text are opened again."""
    config: RetrofitRunConfig = run.config
    if not config.task.data:
        raise UserError(f"run {run.path} was made from Python and does not name its text; go on with distill_on")
    with Heartbeat("retrofit") as beat:
        retrofitted, documents, tokenizer = _open(config.task, config.model.expiry, config.train, beat)
        if base_hash(retrofitted.model) != config.model.hash:
            raise UserError(
                f"the model {config.task.model} has changed since run {run.path} began; put the first one back"
            )
        learner = DistillLearner(retrofitted, documents, config, run.path, tokenizer, beat)
        return _run(learner, lambda: session.go_on(lambda _: learner, run, allow_changed_data=allow_changed_data))


def check_extras(config: DistillConfig) -> None:
    """Refuse what needs a library that is not installed, before a model is loaded."""
    check_tracker(config.tracker)
    if config.lora_rank and importlib.util.find_spec("peft") is None:
        raise UserError(f"--lora-rank needs peft; install it with: {install_command('hf')}")


def _open(
    task: RetrofitTask, expiry: RetrofitConfig, config: DistillConfig, beat: Heartbeat
) -> tuple[Retrofit, list[Tensor], Any]:
    device = check_device(config.device)
    check_retrofit_batch(config, device)
    beat.note("loading the model")
    model, tokenizer = open_model(task.model, task.dtype, str(device))
    check_context(model, config.context)
    retrofitted = retrofit(model, expiry)
    if config.lora_rank:
        retrofitted.add_lora(config.lora_rank)
    beat.say(f"reading {task.data} as tokens")
    documents = read_documents(tokenizer, Path(task.data))
    beat.say(f"read {sum(map(len, documents)):,} tokens, documents: {len(documents):,}")
    check_vocabulary(model, documents)
    retrofitted.beginning = beginning = find_beginning(tokenizer)
    with retrofitted.paused() as base:
        beat.say(describe_beginning(base, tokenizer, documents, beginning))
    joined = join_short(documents, config.context - len(beginning.context), tokenizer, beginning.text)
    return retrofitted, joined, tokenizer


def _run(learner: DistillLearner, work: Any) -> RunFolder:
    """Run the training with the base model frozen, and restore the model's requires_grad and mode afterwards."""
    model = learner.retrofitted.model
    learned = {id(p) for p in learner.retrofitted.parameters()}
    before, training = [(p, p.requires_grad) for p in model.parameters()], model.training
    try:
        model.eval()
        for p, _ in before:
            p.requires_grad_(id(p) in learned)
        return work()
    finally:
        model.train(training)
        for p, flag in before:
            p.requires_grad_(flag)


def describe_run(retrofitted: Retrofit, task: RetrofitTask, config: DistillConfig, seed: int) -> RetrofitRunConfig:
    found = text_config(retrofitted.model)
    first = retrofitted.layers[0]
    ff = getattr(found, "intermediate_size", None)
    sizes: dict[str, Any] = dict(dim=first.dim, ff_dim=ff if isinstance(ff, int) else 4 * first.dim)
    sizes |= dict(
        layers=len(retrofitted.layers), kv_heads=first.kv_heads, head_dim=first.head_dim, expiry=retrofitted.config
    )
    base = BaseModel(family=found.model_type, hash=base_hash(retrofitted.model), **sizes)
    return RunConfig(task, base, config, seed)


class DistillLearner:
    """A `Distiller` with the interface of the training loop; see `loop.Learner`."""

    warmup = 0  # calibration has already placed the spans

    def __init__(
        self,
        retrofitted: Retrofit,
        documents: list[Tensor],
        config: RetrofitRunConfig,
        folder: Path,
        tokenizer: Any = None,
        beat: Heartbeat | None = None,
    ) -> None:
        """tokenizer: for mixtures of more than text. beat: told what is being done."""
        check_extras(config.train)
        self.retrofitted, self.config, self.folder = retrofitted, config, folder
        self.beat = beat
        say = None if beat is None else beat.say
        self.distiller = Distiller(retrofitted, documents, config.train, config.seed, say, tokenizer)
        if beat is not None and not self.distiller.mixture.plain:
            beat.say(self.distiller.mixture.describe())
        self.documents = documents
        self.accelerator = build_accelerator(config.train.device)
        if self.accelerator.num_processes > 1:
            raise UserError(
                f"a retrofit learns in one process, got {self.accelerator.num_processes}; launch it with one"
            )
        shape = config.model.head_dim
        self.impl = resolve_impl(config.model.expiry.impl, self.accelerator.device, head_dim=shape)
        self.lines: list[dict[str, Any]] = []

    def fingerprint(self) -> dict[str, Any]:
        digest, count = hashlib.sha256(), 0
        if self.distiller.begins:
            digest.update(f"each context begins with {self.distiller.begins}".encode())
        for ids in self.documents:
            digest.update(ids.cpu().to(torch.int64).numpy().tobytes())
            count += len(ids)
        if not self.distiller.mixture.plain:
            digest.update(self.distiller.mixture.fingerprint)
        return {"sha256": digest.hexdigest(), "bytes": 8 * count}

    def step(self, index: int) -> int:
        if self.beat is not None and self.distiller.calibrated:
            settings = self.config.train
            limited = f"training for {settings.seconds:g} s" if settings.seconds is not None else ""
            self.beat.note(limited or f"step {index + 1} of {settings.steps}")
        self.lines.append(self.distiller.step(index))
        return self.config.train.batch * self.config.train.context

    def metrics(self) -> dict[str, Any]:
        lines, self.lines = self.lines, []
        mean = lambda name: math.fsum(line[name] for line in lines) / len(lines)  # noqa: E731
        layers = lambda name: [math.fsum(x) / len(lines) for x in zip(*(line[name] for line in lines))]  # noqa: E731
        line: dict[str, Any] = {"loss": mean("kl"), "score": mean("kl"), "live": layers("live_of_layers")}
        goals = [line["goal"] for line in lines[-len(self.distiller.levels) :]]
        line |= {"span": layers("span_of_layers"), "goal": sum(goals) / len(goals), "span_weight": lines[-1]["weight"]}
        return line | {"grad_norm": mean("norm"), "lr": self.distiller.optimizer.param_groups[0]["lr"]}

    def find_fault(self) -> Fault | None:
        for back, line in enumerate(reversed(self.lines)):
            for name, what in (("kl", "loss"), ("norm", "gradient norm")):
                if not math.isfinite(line[name]):
                    advice = (
                        f"try a lower --lr (now {self.distiller.optimizer.param_groups[0]['peak']:g}) or --dtype fp32"
                    )
                    return Fault(back, f"the {what} became {line[name]}", "over the whole batch", advice)
        return None

    def evaluate(self) -> dict[str, Any]:
        if self.beat is not None:
            self.beat.note("judging on held-out text")
        self.distiller.choose(0)
        kl, spans, live = self.distiller.evaluate()
        share = float(live.mean()) / self.config.train.context
        line: dict[str, Any] = {"loss": float(kl), "score": float(kl), "live": live.tolist(), "span": spans.tolist()}
        if not self.distiller.mixture.plain:
            mixed, _, lived = self.distiller.evaluate_mixture()
            line |= {"mixture_loss": float(mixed), "mixture_live": float(lived.mean())}
        return line | {"live_share": share}

    def final_result(self) -> dict[str, Any]:
        further = {}
        for number, level in reversed([*enumerate(self.distiller.levels)]):
            self.distiller.choose(number)
            self.retrofitted.save(self.folder / "adapter" / level.name)
            if level.name:
                kl, _, lived = self.distiller.evaluate()
                further[level.name] = {"score": float(kl), "live_at_end": float(lived.mean()), "target": level.target}
        found = self.evaluate() | ({"more_budgets": further} if further else {})
        live = sum(found["live"]) / len(found["live"])
        about = {"score_name": "nats from the base model", "live_at_end": live, "target": self.distiller.target}
        return {**found, **about, "context": self.config.train.context}

    def describe(self, line: dict[str, Any]) -> list[str]:
        live = sum(line["live"]) / len(line["live"])
        goal = f" (goal {line['goal']:.0f})" if "goal" in line else ""
        return [f"KL {line['loss']:.5f}", f"live {live:.0f}{goal}"]

    def snapshot(self, step: int) -> Snapshot:
        state = {**self.distiller.state_dict(), "lines": self.lines}
        return Snapshot(step, state, None, self.distiller.weights(), self.distiller.moments())

    def load(self, snapshot: Snapshot) -> None:
        self.distiller.load(snapshot.model, snapshot.state, snapshot.optimizer)
        self.distiller.taken, self.lines = snapshot.step, list(snapshot.state["lines"])
