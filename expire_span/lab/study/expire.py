"""Decoders on the same series: with Expire-Span and with the gated unit, trained by the package's supervised training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.checkpoint import load_model
from expire_span.models.decoder import Decoder
from expire_span.models.systems import mixer_config
from expire_span.recipes import entrances
from expire_span.settings.run import RunConfig
from expire_span.tasks.entrances import Entrances, Series, is_inside

from .exercise import TASK, measure
from .training import finish_run


@dataclass(frozen=True)
class Model:
    """One decoder of the comparison."""

    mixer: str
    steps: int = 800
    seed: int = 0

    @property
    def name(self) -> str:
        return f"decoder-{self.mixer}-{self.seed}"

    @property
    def cost(self) -> float:
        """Work in the units of `exercise.Size.cost`, measured."""
        return self.steps / 350


def config_of(model: Model) -> RunConfig:
    """The recipe `entrances` with this memory system."""
    config = entrances()
    mixer = config.model.mixer if model.mixer == config.model.mixer.kind else mixer_config(model.mixer)
    steps = replace(config.train, steps=model.steps, device="cpu", checkpoint_every=200)
    return replace(config, task=TASK, model=replace(config.model, mixer=mixer), train=steps, seed=model.seed)


def train_model(model: Model, runs: Path, tick: Callable[[float], None] = lambda cost: None) -> dict[str, Any]:
    """Train (or continue to train) one decoder in a run folder of its own, and measure it in the same way as the networks."""
    begin, busy = time.perf_counter(), time.process_time()
    path = runs / model.name
    run = finish_run(config_of(model), path, "entrances", model.cost, tick)
    decoder, config = load_model(run)
    found = measure(lambda values: predict(decoder, Entrances(config.task), values))  # type: ignore[arg-type]
    kept = ("score", "live", "live_share")
    result = run.read_result(*kept) or {}
    return {
        "mixer": model.mixer,
        "seed": model.seed,
        "weights": sum(p.numel() for p in decoder.parameters()),
        **{key: result[key] for key in kept},
        "spans": spans_by_kind(decoder, Entrances(config.task)),  # type: ignore[arg-type]
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - busy,
        **found,
    }


@torch.no_grad()
def predict(decoder: Decoder, task: Entrances, values: np.ndarray) -> np.ndarray:
    """Counts [B, T] that a decoder predicts for series [B, T]: the likeliest of the answer tokens."""
    logits, _, _ = decoder.eval()(to_tokens(task, values))
    return logits[:, 1:, task.first_answer :].argmax(-1).numpy()


def to_tokens(task: Entrances, values: np.ndarray) -> torch.Tensor:
    """Series [B, T] as a decoder reads them, [B, 1 + T]."""
    tokens = torch.from_numpy(task.to_levels(values))
    return torch.cat([torch.full_like(tokens[:, :1], task.begin), tokens], 1)


def kinds_of(values: np.ndarray) -> dict[str, np.ndarray]:
    """Masks of the kinds of steps in series [B, T]: entrances, exits, and steps at which neither happens."""
    inside = is_inside(values)
    before = np.zeros_like(inside)
    before[:, 1:] = inside[:, :-1]
    kinds = {"entrance": inside & ~before, "staying inside": inside & before}
    return kinds | {"exit": ~inside & before, "staying outside": ~inside & ~before}


@torch.no_grad()
def spans_by_kind(decoder: Decoder, task: Entrances, series: int = 200) -> list[dict[str, float]]:
    """For each layer, the mean span of steps of each kind, and of entrances and exits early and late in the series.

    The list is empty for memory systems without spans.
    """
    values = Series(task.config, "test", 0).whole(np.arange(series), task.config.max_length)
    kinds, late = kinds_of(values), np.arange(values.shape[1]) >= values.shape[1] // 2
    for kind in ("entrance", "exit"):
        kinds |= {f"early {kind}": kinds[kind] & ~late, f"late {kind}": kinds[kind] & late}
    _, _, aux = decoder.eval()(to_tokens(task, values))
    spans = [layer.span.numpy() for layer in aux.layers if layer.span is not None]
    return [
        {
            "beginning": float(span[:, 0].mean()),
            **{kind: float(span[:, 1:][mask].mean()) for kind, mask in kinds.items()},
        }
        for span in spans
    ]
