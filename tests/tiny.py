"""The smallest runs that still have everything: used by the tests of training, checkpoints and the command line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from expire_span.models.systems.expire_span import PaperDetails
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig, RunConfig, TextTask, TrainConfig

ROOT = Path(__file__).parent.parent
MODEL = {"dim": 16, "layers": 2, "heads": 2, "ff_dim": 16}
MIXER = {"max_span": 64, "ramp": 4, "initial_span": 0.5}
TRAIN = {"steps": 12, "batch": 4, "block": 8, "warmup": 2, "log_every": 2, "eval_every": 6, "eval_batches": 2}


def write_text(folder: Path, size: int = 3000) -> Path:
    """A file of words that repeat, so that there is something to learn."""
    draw = random.Random(7)
    words = " ".join(draw.choice(["one", "two", "three", "memory", "fades"]) for _ in range(size))
    path = folder / "text.txt"
    path.write_bytes(words.encode()[:size])
    return path


def tiny_config(text: Path, model: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    mixer = ExpireSpanConfig(**MIXER)
    decoder = DecoderConfig.modern(**{**MODEL, "mixer": mixer, **(model or {})})
    settings = {**TRAIN, "checkpoint_every": 5, "device": "cpu", **train}
    return RunConfig(TextTask(path=str(text), valid_share=0.1, test_share=0.1), decoder, TrainConfig(**settings))


def noisy_config(text: Path, **train: Any) -> RunConfig:
    """Every source of randomness and every kind of state at once."""
    config = tiny_config(text, {"dropout": 0.1, "layer_drop": 0.2}, accumulate=2, optimizer="muon", **train)
    mixer = replace(config.model.mixer, paper=PaperDetails(noisy=True))
    budget = replace(config.train.budget, live=10.0, gain=0.2)
    return replace(config, model=replace(config.model, mixer=mixer), train=replace(config.train, budget=budget))


def as_options(config: RunConfig, recipe: RunConfig) -> list[str]:
    """The options that turn a recipe's config into `config` on the command line."""
    out: list[str] = []
    _collect(config, recipe, "", out)
    return out


def _collect(config: Any, recipe: Any, prefix: str, out: list[str]) -> None:
    for name in config.__dataclass_fields__:
        new, old = getattr(config, name), getattr(recipe, name)
        if hasattr(new, "__dataclass_fields__"):
            _collect(new, old, f"{prefix}{name}.", out)
        elif new != old:
            out += [f"--{prefix}{name}".replace("_", "-"), str(new)]


def _heed_interrupts() -> None:
    """Restore the handler of Ctrl-C, which a shell sets to "ignore" for programs that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def spawn(*args: str, launcher: tuple[str, ...] = ("-m", "expire_span"), **options: Any) -> subprocess.Popen[str]:
    """The command line as a real process, with this process's number of threads."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        "env": env,
        "preexec_fn": _heed_interrupts,
    }
    return subprocess.Popen([sys.executable, *launcher, *args], **{**pipes, **options})
