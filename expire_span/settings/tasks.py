"""Settings of tasks, each with a literal `kind`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import checked, require
from expire_span.field_docs import documented


def _check_splits(task: TextTask | WordsTask) -> None:
    for name in ("valid_share", "test_share"):
        require(0 < getattr(task, name) < 0.5, f"{name} must lie between 0 and 0.5, got {getattr(task, name)}")


def _check_lengths(task: RecallTask | EntrancesTask | CopyTask | CorridorTask | TMazeTask) -> None:
    given = f"got {task.max_length} and {task.min_length}"
    require(task.max_length >= task.min_length, f"max_length must be at least min_length, {given}")


def _check_shares(task: object, *names: str) -> None:
    for name in names:
        require(0 <= getattr(task, name) <= 1, f"{name} must lie in [0, 1], got {getattr(task, name)}")


@documented
@dataclass(frozen=True)
@checked
class TextTask:
    """Predict the next byte of a text, or the next token of a tokenizer."""

    kind: Literal["text"] = "text"
    path: str = ""
    """File of text, or folder whose files are read in name order; bytes are read as they are."""
    tokenizer: str = ""
    """File of a Hugging Face tokenizer (tokenizer.json) that turns UTF-8 text into tokens; none reads bytes."""
    valid_share: float = 0.05
    """Share of the bytes, after the training bytes, that is kept for validation."""
    test_share: float = 0.05
    """Share of the bytes, at the very end, that is kept for the test."""
    shuffle: bool = False
    """In each pass, cut the training text into blocks at another place and read them in random order, each without memory of
    what came before it."""

    def __post_init__(self) -> None:
        _check_splits(self)


@documented
@dataclass(frozen=True)
@checked
class RecallTask:
    """A colour cue, a long corridor of distracting observations, then: which colour was it?"""

    kind: Literal["recall"] = "recall"
    min_length: int = 50
    """Shortest corridor, in steps."""
    max_length: int = 300
    """Longest corridor, in steps."""
    colours: int = 4
    """Number of colours a cue can have."""
    distractors: int = 8
    """Number of kinds of plain corridor observations."""
    distractor_prob: float = 0.3
    """Chance that a corridor step shows a coloured niche: any colour, and it means nothing."""
    blank_prob: float = 0.0
    """Share of episodes without a cue, to be answered with "none"; else one colour can be told from its absence alone."""

    def __post_init__(self) -> None:
        require(self.min_length >= 1, f"min_length must be at least 1, got {self.min_length}")
        _check_lengths(self)
        require(self.colours >= 2, f"colours must be at least 2, got {self.colours}")
        require(self.distractors >= 1, f"distractors must be at least 1, got {self.distractors}")
        _check_shares(self, "distractor_prob", "blank_prob")

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
    min_length: int = 20
    """Shortest series, in steps."""
    max_length: int = 20
    """Longest series, in steps."""
    max_count: int = 25
    """Largest count with an answer of its own; from there on the answer stays."""
    spread: float = 1.5
    """Standard deviation of the series around 0.5, before the margin."""
    smooth: int = 3
    """Number of draws of which each value is the mean; neighbouring values share all but one."""
    margin: float = 0.2
    """No value lies nearer than this to 0 or to 1, so that nothing depends on the exact place of an edge."""
    levels: int = 4
    """Number of tokens per unit of the series, into which values are quantised for a decoder."""

    def __post_init__(self) -> None:
        for name in ("min_length", "max_count", "smooth", "levels"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _check_lengths(self)
        require(self.spread > 0, f"spread must be greater than 0, got {self.spread}")
        require(0 <= self.margin < 0.5, f"margin must lie in [0, 0.5), got {self.margin}")

    @property
    def farthest(self) -> int:
        """The most steps back that an answer depends on: to the first value."""
        return self.max_length - 1


@documented
@dataclass(frozen=True)
@checked
class WordsTask:
    """Predict the next word of a text file, or of built-in little tales."""

    kind: Literal["words"] = "words"
    path: str = ""
    """File of text; empty takes built-in tales, in which things said early matter late."""
    words: int = 5000
    """Number of the commonest words and marks of the training part that have a token; all others are "unknown"."""
    tales: int = 2000
    """How many tales are told, where no file is given."""
    valid_share: float = 0.05
    """Share of the words, after the training words, that is kept for validation."""
    test_share: float = 0.05
    """Share of the words, at the very end, that is kept for the test."""

    def __post_init__(self) -> None:
        for name in ("words", "tales"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _check_splits(self)


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
    growth: int = 0
    """Training episodes after which the longest length doubles, starting from twice min_length; 0 has all from the start."""
    max_count: int = 8
    """Most A tokens; their number is uniform from 1 to this."""
    fillers: int = 8
    """Number of kinds of filler tokens."""

    def __post_init__(self) -> None:
        require(self.max_count >= 2, f"max_count must be at least 2, got {self.max_count}")
        require(self.fillers >= 1, f"fillers must be at least 1, got {self.fillers}")
        require(self.growth >= 0, f"growth must be 0 or more, got {self.growth}")
        least = self.max_count + 2
        require(
            self.min_length >= least,
            f"min_length must hold the start, {self.max_count} A tokens and the question, {least}, got {self.min_length}",
        )
        _check_lengths(self)

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
    size: int = 16
    """Side of the grid, in cells."""
    colours: int = 5
    """Number of colours; collisions are kept for each ordered pair of them."""
    colour_prob: float = 0.05
    """Chance a frame that a particle draws a new colour."""
    latest_prob: float = 0.4
    """Chance that a question is easy (see easy); else both its colours are uniform."""
    easy: Literal["latest", "now"] = "latest"
    """What an easy question asks about, once there has been a collision: the pair that collided last, as the paper describes
    it, or the colours that the particles have now, as in the released process, where fewer answers are near. Saved simulations
    have the kind that they were made with (expire-span data collision --easy)."""
    speed: float = 0.5
    """Standard deviation of a velocity, in cells a frame and axis."""
    eval_frames: int = 100_000
    """Frames of the validation and of the test split, over all rows."""
    meet_prob: float = 0.0
    """In training, chance a frame that the second particle is shown in the first one's cell, so that collisions are frequent
    and answers near: an aid that the paper's setting does not have; validation and test never have it. Saved simulations have
    the chance that they were made with (expire-span data collision --meet-prob)."""
    meet_probs: tuple[float, ...] = ()
    """Several such chances instead of one: equal parts of the rows have one each, so that easy and hard rows are learned side
    by side."""
    hints: bool = False
    """In training, ask at the sixth token of every frame whether the particles have just collided, and in which quadrant. The
    paper's setting does not have this aid; validation and test never have it."""

    def __post_init__(self) -> None:
        require(self.size >= 2, f"size must be at least 2, got {self.size}")
        require(1 <= self.colours <= 64, f"colours must lie in 1..64, got {self.colours}")
        _check_shares(self, "colour_prob", "latest_prob", "meet_prob")
        for share in self.meet_probs:
            require(0 <= share <= 1, f"meet_probs must lie in [0, 1], got {self.meet_probs}")
        limit = self.size / 4  # faster particles could hardly be kept inside the grid
        require(0 < self.speed <= limit, f"speed must lie in (0, size / 4 = {limit:g}], got {self.speed}")
        require(self.eval_frames >= 1, f"eval_frames must be at least 1, got {self.eval_frames}")


@documented
@dataclass(frozen=True)
@checked
class BooksTask:
    """Predict the next character of whole books; memory is emptied where a book begins."""

    kind: Literal["books"] = "books"
    path: str = "data/books"
    """Folder of .txt books, or with train, validation and test folders of them (the layout of PG-19)."""
    characters: int = 255
    """Number of the commonest characters of the training books that have a token; all others share one token."""

    def __post_init__(self) -> None:
        require(1 <= self.characters <= 65_000, f"characters must lie in 1..65000, got {self.characters}")


def _check_view(view: int) -> None:
    require(view in (3, 5, 7), f"view must be 3, 5 or 7, got {view}")


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
    colours: int = 2
    """Number of colours and of doors (K)."""
    niche_prob: float = 0.3
    """Chance that a wall cell holds a coloured box, which means nothing."""
    shuffled: bool = False
    """Whether the doors' places are drawn anew for every episode; otherwise each colour has its own."""
    passive: bool = False
    """Whether the agent moves right by itself, so that it only chooses a door."""
    recue_prob: float = 0.0
    """Chance of a second cue half-way, which replaces the first."""
    view: int = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        require(
            2 <= self.colours <= 5, f"colours must lie in 2..5, since five have an id of their own, got {self.colours}"
        )
        least = (self.colours + 1) // 2 + 1
        require(
            self.min_length >= least,
            f"min_length must be at least {least} to hold the cue and {self.colours} doors, got {self.min_length}",
        )
        _check_lengths(self)
        _check_shares(self, "niche_prob", "recue_prob")
        _check_view(self.view)

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
    min_length: int = 10
    """Shortest corridor, in cells; the same as max_length for a fixed length."""
    max_length: int = 30
    """Longest corridor, in cells."""
    mazes: int = 10
    """Number of corridors in an episode (M)."""
    view: int = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        require(self.min_length >= 2, f"min_length must be at least 2, a start and an end, got {self.min_length}")
        require(self.mazes >= 1, f"mazes must be at least 1, got {self.mazes}")
        _check_lengths(self)
        _check_view(self.view)


@documented
@dataclass(frozen=True)
@checked
class PortalTask:
    """A chain of rooms with two coloured doors each: one leads on, the other back to the first room."""

    kind: Literal["portal"] = "portal"
    rooms: int = 8
    """Number of rooms (N)."""
    width: int = 3
    """Cells from one side of a room to the other; odd."""
    marked: bool = True
    """Whether each room shows a marker of its own."""
    laps: int = 1
    """How often the chain must be passed; the right doors stay the same."""
    max_steps: int = 300
    """Steps after which an episode is cut off."""
    view: int = 5
    """Side of the square of cells that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        require(1 <= self.rooms <= 60, f"rooms must lie in 1..60, since sixty markers have an id, got {self.rooms}")
        require(self.width >= 3 and self.width % 2 == 1, f"width must be odd and at least 3, got {self.width}")
        for name in ("laps", "max_steps"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        _check_view(self.view)

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
    size: int = 3
    """Places lie in a square of this side."""
    cancel_prob: float = 0.2
    """Chance that an instruction is cancelled later; the first one never is."""
    replace_prob: float = 0.2
    """Chance that another act is asked for later, at the same place."""
    pairs: Literal["seen", "held_out", "all"] = "seen"
    """Which combinations of verb and object occur; a quarter is held out for evaluation."""
    view: int = 3
    """Side of the square of places that the agent sees: 3, 5 or 7."""

    def __post_init__(self) -> None:
        require(2 <= self.size <= 4, f"size must lie in 2..4, since sixteen places have a name, got {self.size}")
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
        _check_shares(self, "cancel_prob", "replace_prob")
        both = self.cancel_prob + self.replace_prob
        require(both <= 1, f"cancel_prob + replace_prob must be at most 1, got {both:g}")
        _check_view(self.view)


TaskConfig = (
    TextTask
    | RecallTask
    | EntrancesTask
    | WordsTask
    | CopyTask
    | CollisionTask
    | BooksTask
    | CorridorTask
    | PortalTask
    | InstructionTask
)
"""Any task's config; each has a literal `kind`."""
OUTSIDE_TASKS: dict[str, type] = {}
"""Config classes that users registered from outside the package, by kind (see expire_span.tasks.registry)."""
