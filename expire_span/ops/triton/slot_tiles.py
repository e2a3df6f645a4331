"""How a decoding step over slots is cut into programs.

A program reads some of the tiles of one query head of one row. Heads of one layer may hold 20 memories or 3,000, and a launch
takes as long as its longest program: so a head is read by as many programs as its capacity asks for, and the last of them to
finish adds their partial sums. The capacities are known to the host, and the division changes only when
slots grow; how many of its slots a head uses is read on the device, and its programs take every n-th tile of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MOST_PROGRAMS = 64
"""Programs of one head of one row, at most: the largest scores of all of them are read at once."""


class SlotTiles(NamedTuple):
    """How a step is cut into programs."""

    slots: int = 32
    """Slots that a program reads at once."""
    warps: int | None = None
    """Warps of a program; None takes one for heads of up to 64 dimensions, and two for wider ones."""
    stages: int = 1
    """Pipeline depth: how many loads of a program are in flight at once."""
    programs: int = 2112
    """Programs that a GPU runs at once, sixteen for each multiprocessor of a large one: tiles are distributed over so many."""
    skip_dead: bool = True
    """Whether a program reads the keys and values of living memories only, and skips tiles without any."""


_tiles = SlotTiles()


def tiles() -> SlotTiles:
    """The tiles in use."""
    return _tiles


def override(tiles: SlotTiles) -> None:
    """Use other tiles (benchmarks)."""
    global _tiles
    _tiles = tiles


class Division(NamedTuple):
    """The programs of one row, the same for every row."""

    programs: Tensor
    """[programs, 3] int32: the query head, the first tile, and the step from tile to tile, which is the head's number of programs."""
    finished: Tensor
    """[rows, heads] int32: how many programs of a head that has several have finished; zero between launches."""
    most: int
    """Programs of one head, at most."""


def count_programs(slots: Sequence[int], copies: int) -> list[int]:
    """Programs of each key/value head, given its slots; copies: the number of rows times that of query heads per such head."""
    chosen = tiles()
    lengths = [-(-n // chosen.slots) for n in slots]
    each = max(1, -(-copies * sum(lengths) // chosen.programs))  # tiles of a program, so that all programs run at once
    return [min(-(-n // each), MOST_PROGRAMS) for n in lengths]


def divide(programs: Sequence[int], group: int, rows: int, device: torch.device | str) -> Division:
    """The programs of key/value heads that have so many each, for `group` query heads of each; the longest work comes first."""
    heads = sorted(range(len(programs) * group), key=lambda head: -programs[head // group])
    items = [(head, n, programs[head // group]) for head in heads for n in range(programs[head // group])]
    finished = torch.zeros(rows, len(heads), dtype=torch.int32, device=device)
    return Division(torch.tensor(items, dtype=torch.int32).to(device), finished, most=max(programs))
