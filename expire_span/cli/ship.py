"""`expire-span ship RUN --out FOLDER`: exports a run as a small folder with half-precision weights and a model card."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.checks import Count
from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, parse
from .runs import with_data


@dataclass(frozen=True)
class Ship:
    """Export a run on text as a small folder: half-precision weights, score, live memories, a sample, a model card."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of a run under --runs-dir, or the path of its folder."""
    out: Path
    """Folder to write; its name is the model's name."""
    data: str
    """Description of the training data, in words, for the card."""
    note: str = ""
    """A sentence at the top of the card."""
    sample: Path | None = None
    """Text to store with the model; None takes the first bytes of the test data."""
    path: str | None = None
    """Where the data is now, if it has moved since training."""
    batches: Count = 16
    """Number of batches of the test data on which the score is measured."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""


def run_ship(args: list[str]) -> int:
    command = parse(Ship, args, f"{PROGRAM} ship")
    run = find_run(command.run, command.runs_dir)
    if "path" in run.config.kind.eval_options:
        with_data(run, command.path)  # a place that is not there is refused with the option that this command has
    sample = None if command.sample is None else command.sample.read_bytes()
    if sample == b"":
        raise UserError(f"--sample {command.sample} is empty; give a file with text, or leave it out")
    from expire_span.train.ship import Shipment, ship

    about = Shipment(command.data, command.note, sample, command.batches)
    print(ship(run, command.out, about, path=command.path, device=command.device).path)
    return 0
