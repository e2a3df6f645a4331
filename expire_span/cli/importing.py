"""`expire-span import`: a checkpoint of the paper's released code becomes a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.checks import Count
from expire_span.runs import check_name, check_new
from expire_span.settings.run import TrainConfig

from .parsing import PROGRAM, parse


def _default_training() -> TrainConfig:
    """How `resume` trains an imported run: with the released recipe's learning rate after its decay, without warm-up."""
    return TrainConfig(steps=1000, batch=16, lr=7e-5, warmup=0, schedule="constant", clip=0.3, betas=(0.9, 0.999))


@dataclass(frozen=True)
class Import:
    """Make a run folder of a checkpoint that the paper's released code wrote; eval, generate, report and resume take it."""

    checkpoint: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """The file; it is loaded as weights alone, so code in it is never run."""
    out: str
    """Name of the new run under --runs-dir, or the path of its folder."""
    ramp: Count
    """--expire-span-ramp of its training."""
    max_span: Count | None = None
    """--attn-lim of its training; None derives it from the file."""
    temperature: float = 1.0
    """--expire-span-pre-div of its training."""
    heads: Count | None = None
    """--nheads of its training; None derives it from the file."""
    dropout: float = 0.0
    """Dropout of further training."""
    path: str = ""
    """The text on which it was trained: for eval and resume, and to find which token stands for which byte."""
    symbols: str | None = None
    """File with the symbol of each token, one a line (60, 32, <eos> ...); None finds them in the text of --path."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    train: TrainConfig = field(default_factory=_default_training)
    """How `resume` trains it further; the block is the checkpoint's."""


def run_import(args: list[str]) -> int:
    command = parse(Import, args, f"{PROGRAM} import")
    path = Path(command.out) if "/" in command.out else command.runs_dir / command.out
    check_name(path.name)
    check_new(path)
    from expire_span.train.import_official import Given, import_checkpoint

    given = Given(
        command.ramp,
        command.max_span,
        command.temperature,
        command.heads,
        command.dropout,
        command.path,
        command.symbols,
    )
    run = import_checkpoint(command.checkpoint, path, given, command.train)
    model = run.config.model
    mixer = model.mixer
    print(
        f"{run.name}: {model.layers} layers of {model.dim}, spans up to {mixer.max_span}, ramp {mixer.ramp}, "  # type: ignore[union-attr]
        f"run folder {run.path}; try: {PROGRAM} generate {run.path}"
    )
    return 0
