"""Settings of tasks whose sequences are made up: recall, entrances, copy, collision. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from expire_span.checks import Bound, Count, Natural, Positive, Share, at_least, checked, require
from expire_span.field_docs import documented

Several = Annotated[int, at_least(2)]


def check_lengths(task: Any) -> None:
    """Refuse a task whose longest episodes are shorter than its shortest."""
    given = f"got {task.max_length} and {task.min_length}"
    require(task.max_length >= task.min_length, f"max_length must be at least min_length, {given}")


@documented
@dataclass(frozen=True)
@checked
class RecallTask:
    """A colour cue, a long corridor of distracting observations, then: which colour was it?"""

    kind: Literal["recall"] = "recall"
    min_length: Count = 50
    """Shortest corridor, in steps."""
    max_length: int = 300
    """Longest corridor, in steps."""
    colours: Several = 4
    """Number of colours a cue can have."""
    distractors: Count = 8
    """Number of kinds of plain corridor observations."""
    distractor_prob: Share = 0.3
    """Chance that a corridor step shows a coloured niche: any colour, and it means nothing."""
    blank_prob: Share = 0.0
    """Share of episodes without a cue, to be answered with "none"; else one colour can be told from its absence alone."""

    def __post_init__(self) -> None:
        check_lengths(self)

    @property
    def farthest(self) -> int:
        """The most steps back that an answer depends on: from the question to the cue."""
        return self.max_length + 1


@documented
@dataclass(frozen=True)
@checked
class EntrancesTask:
    """A number every step: how many times has the series come into [0, 1] so far?"""

    kind: Literal["entrances"] = "entrances"
    min_length: Count = 20
    """Shortest series, in steps."""
    max_length: int = 20
    """Longest series, in steps."""
    max_count: Count = 25
    """Largest count with an answer of its own; from there on the answer stays."""
    spread: Positive = 1.5
    """Standard deviation of the series around 0.5, before the margin."""
    smooth: Count = 3
    """Number of draws of which each value is the mean; neighbouring values share all but one."""
    margin: Annotated[float, Bound("lie in [0, 0.5)", lambda x: 0 <= x < 0.5)] = 0.2
    """No value lies nearer than this to 0 or to 1, so that nothing depends on the exact place of an edge."""
    levels: Count = 4
    """Number of tokens per unit of the series, into which values are quantised for a decoder."""

    def __post_init__(self) -> None:
        check_lengths(self)

    @property
    def farthest(self) -> int:
        """The most steps back that an answer depends on: to the first value."""
        return self.max_length - 1


@documented
@dataclass(frozen=True)
@checked
class CopyTask:
    """A few A tokens, a long stretch of filler, then: how many A tokens were there?"""

    kind: Literal["copy"] = "copy"
    min_length: int = 32
    """Shortest training episode, in tokens; every doubling of the length up to max_length is equally frequent."""
    max_length: int = 2048
    """Tokens of every validation and test episode, and of the longest training episode (T)."""
    growth: Natural = 0
    """Training episodes after which the longest length doubles, starting from twice min_length; 0 has all from the start."""
    max_count: Several = 8
    """Most A tokens; their number is uniform from 1 to this."""
    fillers: Count = 8
    """Number of kinds of filler tokens."""

    def __post_init__(self) -> None:
        least = self.max_count + 2
        require(
            self.min_length >= least,
            f"min_length must hold the start, {self.max_count} A tokens and the question, {least}, got {self.min_length}",
        )
        check_lengths(self)

    @property
    def farthest(self) -> int:
        """The most steps back that an answer depends on: from the question to the first token."""
        return self.max_length - 1


@documented
@dataclass(frozen=True)
@checked
class CollisionTask:
    """Two coloured particles move on a grid: in which quadrant did two colours last collide?"""

    kind: Literal["collision"] = "collision"
    path: str = ""
    """Folder with saved simulations (expire-span data collision); empty simulates endlessly while training."""
    size: Several = 16
    """Side of the grid, in cells."""
    colours: Annotated[int, Bound("lie in 1..64", lambda x: 1 <= x <= 64)] = 5
    """Number of colours; collisions are kept for each ordered pair of them."""
    colour_prob: Share = 0.05
    """Chance a frame that a particle draws a new colour."""
    latest_prob: Share = 0.4
    """Chance that a question is easy (see easy); else both its colours are uniform."""
    easy: Literal["latest", "now"] = "latest"
    """What an easy question asks about, once there has been a collision: the pair that collided last, as the paper describes
    it, or the colours that the particles have now, as in the released process, where fewer answers are near. Saved simulations
    have the kind that they were made with (expire-span data collision --easy)."""
    speed: float = 0.5
    """Standard deviation of a velocity, in cells a frame and axis."""
    eval_frames: Count = 100_000
    """Frames of the validation and of the test split, over all rows."""
    meet_prob: Share = 0.0
    """In training, chance a frame that the second particle is shown in the first one's cell, so that collisions are frequent
    and answers near: an aid that the paper's setting does not have; validation and test never have it. Saved simulations have
    the chance that they were made with (expire-span data collision --meet-prob)."""
    meet_probs: tuple[Share, ...] = ()
    """Several such chances instead of one: equal parts of the rows have one each, so that easy and hard rows are learned side
    by side."""
    hints: bool = False
    """In training, ask at the sixth token of every frame whether the particles have just collided, and in which quadrant. The
    paper's setting does not have this aid; validation and test never have it."""

    def __post_init__(self) -> None:
        limit = self.size / 4  # faster particles could hardly be kept inside the grid
        require(0 < self.speed <= limit, f"speed must lie in (0, size / 4 = {limit:g}], got {self.speed}")
