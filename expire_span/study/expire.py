"""Decoders on the same series: Expire-Span, and the gated unit inside the same skeleton, trained by the ordinary "
"training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.config import RunConfig
from expire_span.mixer_configs import mixer_config
from expire_span.models.decoder import Decoder
from expire_span.recipes import entrances
from expire_span.runs import RunFolder
from expire_span.tasks.entrances import Entrances
from expire_span.train.checkpoint import load_model
from expire_span.train.supervised import resume, train

from .exercise import TASK, measure


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
    """Train (or go on training) one decoder in a run folder of its own, and measure it as the networks are."""
    begin, path = time.perf_counter(), runs / model.name
    if (path / "config.json").is_file():
        run = RunFolder.open(path)
        run = run if run.finished else resume(run, shown=False)
    else:
        run = train(config_of(model), path, recipe="entrances", shown=False)
    tick(model.cost)
    decoder, config = load_model(run)
    found = measure(lambda values: predict(decoder, Entrances(config.task), values))  # type: ignore[arg-type]
    result = run.read_result() or {}
    return {
        "mixer": model.mixer,
        "seed": model.seed,
        "weights": sum(p.numel() for p in decoder.parameters()),
        **{key: result[key] for key in ("score", "live", "live_share")},
        "seconds": time.perf_counter() - begin,
        **found,
    }


@torch.no_grad()
def predict(decoder: Decoder, task: Entrances, values: np.ndarray) -> np.ndarray:
    """Counts [B, T] that a decoder answers for series [B, T]: the likeliest of the answers."""
    tokens = torch.from_numpy(task.to_levels(values))
    tokens = torch.cat([torch.full_like(tokens[:, :1], task.begin), tokens], 1)
    logits, _, _ = decoder.eval()(tokens)
    return logits[:, 1:, task.first_answer :].argmax(-1).numpy()
