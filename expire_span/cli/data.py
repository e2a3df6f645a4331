"""`expire-span data`: download or generate a data set, check it, and store it where the recipes look for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from expire_span.checks import Count
from expire_span.runs import UserError

from .bars import progress_bar
from .parsing import PROGRAM, nearest, parse, take_name

NAMES = {
    "enwik8": "the first 100,000,000 bytes of English Wikipedia (36 MB to fetch)",
    "books": "PG-19: whole books in train, validation and test folders (11 GB), or your own with --from",
    "pg19": "the same as books",
    "collision": "saved simulations of the collision task",
}


@dataclass(frozen=True)
class Data:
    """Download or generate a data set and check it; after an interruption, the same command continues."""

    source: Annotated[str | None, tyro.conf.arg(name="from", metavar="FILE|URL")] = None
    """enwik8, books: local file, folder or URL to use instead of the public source."""
    to: Path | None = None
    """Where to put it; data/NAME by default, where the recipes look for it."""
    frames: int = 1_200_000
    """collision: number of frames to save, over all splits."""
    meet_prob: tuple[float, ...] = (0.0,)
    """collision: probability, per frame of the training split, that the particles are made to meet, as easier lessons; several
    divide the split into as many equal parts, so that easy and hard rows are learned side by side."""
    easy: Literal["latest", "now"] = "latest"
    """collision: what the easy questions ask about: the pair that collided last, or the colours that the particles have now, as
    in the released process."""
    books: Count | None = None
    """books: number of books of PG-19 to download for each split; None downloads all."""


def _usage() -> str:
    listed = "\n".join(f"  {name:<11}{text}" for name, text in NAMES.items())
    return f"usage: {PROGRAM} data NAME [--from FILE|URL] [--to PLACE]\n\ndata sets:\n{listed}"


def run_data(args: list[str]) -> int:
    taken = take_name(args, "data", "name", NAMES, _usage)
    if taken is None:
        return 0
    name, rest = taken
    if name not in NAMES:
        raise UserError(f"unknown data set {name!r}; {nearest(name, list(NAMES))}")
    command = parse(Data, rest, f"{PROGRAM} data {name}")
    _check(name, command)
    place = command.to or Path("data") / {"pg19": "books"}.get(name, name)
    with progress_bar(name) as report:
        path = _make(name, place, command, report)
    print(f"{name} is ready: {path}")
    return 0


def _check(name: str, command: Data) -> None:
    """Refuse what a data set cannot use; an option that is ignored would leave the user with other data than asked for."""
    if name == "collision" and command.source is not None:
        raise UserError(f"collision is simulated and takes no --from, got {command.source}")
    usual = Data()
    for option, owner in (
        ("frames", "collision"),
        ("meet_prob", "collision"),
        ("easy", "collision"),
        ("books", "books"),
    ):
        if getattr(command, option) != getattr(usual, option) and owner != {"pg19": "books"}.get(name, name):
            raise UserError(f"--{option.replace('_', '-')} is an option of {owner}, and {name} does not take it")
    if command.books is not None and command.source is not None:
        raise UserError(f"--books limits the download of PG-19 and takes no --from, got {command.source}")


def _make(name: str, place: Path, command: Data, report: Callable[[int, int | None], None]) -> Path:
    from expire_span.tasks import datasets

    if name == "enwik8":
        return datasets.make_enwik8(place, command.source, report)
    if name == "collision":
        return datasets.make_collision(place, command.frames, report, meet_probs=command.meet_prob, easy=command.easy)
    return datasets.make_books(place, command.source, report, limit=command.books)
