"""Settings of the grid worlds. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from expire_span.checks import Bound, Count, Share, checked, require
from expire_span.field_docs import documented
from expire_span.settings.sequence_tasks import check_lengths

View = Literal[3, 5, 7]


@documented
@dataclass(frozen=True)
@checked
class CorridorTask:
    """A coloured cue, a long corridor with coloured distractions, and coloured doors at its end: which one is right?"""

    kind: Literal["corridor"] = "corridor"
    min_length: int = 3
    """Shortest corridor, in cells."""
    max_length: int = 60
    """Longest corridor, in cells."""
    colours: Annotated[int, Bound("lie in 2..5, since five have an id of their own", lambda x: 2 <= x <= 5)] = 2
    """Number of colours and of doors (K)."""
    niche_prob: Share = 0.3
    """Chance that a wall cell holds a coloured box, which means nothing."""
    shuffled: bool = False
    """Whether the doors' places are drawn anew for every episode; otherwise each colour has its own."""
    passive: bool = False
    """Whether the agent moves right by itself, so that it only chooses a door."""
    recue_prob: Share = 0.0
    """Chance of a second cue half-way, which replaces the first."""
    view: View = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        least = (self.colours + 1) // 2 + 1
        require(
            self.min_length >= least,
            f"min_length must be at least {least} to hold the cue and {self.colours} doors, got {self.min_length}",
        )
        check_lengths(self)

    @property
    def farthest(self) -> int:
        """The most steps back that a choice depends on: from the last cell to the cue."""
        return self.max_length - 1


@documented
@dataclass(frozen=True)
@checked
class TMazeTask:
    """Corridors one after the other, each with a cue at its start that tells the right turn at its end."""

    kind: Literal["tmaze"] = "tmaze"
    min_length: Annotated[int, Bound("be at least 2, a start and an end", lambda x: x >= 2)] = 10
    """Shortest corridor, in cells; the same as max_length for a fixed length."""
    max_length: int = 30
    """Longest corridor, in cells."""
    mazes: Count = 10
    """Number of corridors in an episode (M)."""
    view: View = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        check_lengths(self)


@documented
@dataclass(frozen=True)
@checked
class PortalTask:
    """A chain of rooms with two coloured doors each: one leads on, the other back to the first room."""

    kind: Literal["portal"] = "portal"
    rooms: Annotated[int, Bound("lie in 1..60, since sixty markers have an id", lambda x: 1 <= x <= 60)] = 8
    """Number of rooms (N)."""
    width: Annotated[int, Bound("be odd and at least 3", lambda x: x >= 3 and x % 2 == 1)] = 3
    """Cells from one side of a room to the other; odd."""
    marked: bool = True
    """Whether each room shows a marker of its own."""
    laps: Count = 1
    """How often the chain must be passed; the right doors stay the same."""
    max_steps: Count = 300
    """Steps after which an episode is cut off."""
    view: View = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    @property
    def steps_per_room(self) -> int:
        """Steps from a room's entrance through one of its doors."""
        return self.width // 2 + 2


@documented
@dataclass(frozen=True)
@checked
class InstructionTask:
    """Instructions scattered in long talk: at the right place, do what was asked, unless it was cancelled or replaced."""

    kind: Literal["instruction"] = "instruction"
    instructions: int = 3
    """How many instructions are given, each for a place of its own (M)."""
    talk: int = 200
    """Steps of talk; all but the instructions and their changes is distraction."""
    least_talk: int = 0
    """Expert episodes for training begin with this many steps of talk and grow by doublings up to `talk`; shorter ones stay in
    the mix, since they teach the sentences. 0 is `talk` in all of them, as in validation and test."""
    size: Annotated[int, Bound("lie in 2..4, since sixteen places have a name", lambda x: 2 <= x <= 4)] = 3
    """Places lie in a square of this side."""
    cancel_prob: Share = 0.2
    """Chance that an instruction is cancelled later; the first one never is."""
    replace_prob: Share = 0.2
    """Chance that another act is asked for later, at the same place."""
    pairs: Literal["seen", "held_out", "all"] = "seen"
    """Which combinations of verb and object occur; a quarter is held out for evaluation."""
    view: View = 3
    """Side of the square of places that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        places = self.size**2
        require(
            1 <= self.instructions <= places,
            f"instructions must lie in 1..{places}, the number of places, got {self.instructions}",
        )
        least = 2 * self.instructions
        require(
            self.talk >= least,
            f"talk must have at least {least} steps for {self.instructions} instructions and their changes, got {self.talk}",
        )
        in_range = self.least_talk == 0 or least <= self.least_talk <= self.talk
        require(in_range, f"least_talk must be 0 or lie in {least}..{self.talk}, got {self.least_talk}")
        both = self.cancel_prob + self.replace_prob
        require(both <= 1, f"cancel_prob + replace_prob must be at most 1, got {both:g}")
