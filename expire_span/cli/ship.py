"""`expire-span ship RUN --out FOLDER`: weights in half precision with a card, small enough to give away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, parse


@dataclass(frozen=True)
class Ship:
    """Make a small folder of a run of text: weights in half precision, score, live memories, a sample, a card."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name of a run under --runs-dir, or the path of its folder."""
    out: Path
    """Folder to write; its name is the model's name."""
    data: str
    """What the model learned from, in words, for the card."""
    note: str = ""
    """A sentence at the head of the card."""
    sample: Path | None = None
    """Text that goes with the model; None takes the first bytes of the test data."""
    path: str | None = None
    """Where the data is now, if it has moved since training."""
    batches: int = 16
    """Batches of the test data that the score is measured on."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""


def run_ship(args: list[str]) -> int:
    command = parse(Ship, args, f"{PROGRAM} ship")
    if command.batches < 1:
        raise UserError(f"--batches must be at least 1, got {command.batches}")
    run = find_run(command.run, command.runs_dir)
    sample = None if command.sample is None else command.sample.read_bytes()
    if sample == b"":
        raise UserError(f"--sample {command.sample} is empty; give a file with text, or leave it out")
    from expire_span.train.ship import Shipment, ship

    about = Shipment(command.data, command.note, sample, command.batches)
    print(ship(run, command.out, about, path=command.path, device=command.device).path)
    return 0
