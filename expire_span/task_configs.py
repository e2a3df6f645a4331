"""Settings of tasks, each with a literal `kind`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import require


@dataclass(frozen=True)
class TextTask:
    """Predict the next byte of a file, or of every file of a folder in name order."""

    kind: Literal["text"] = "text"
    path: str = ""
    """File or folder of text; bytes are read as they are."""
    valid_share: float = 0.05
    """Share of the bytes, after the training bytes, that is kept for validation."""
    test_share: float = 0.05
    """Share of the bytes, at the very end, that is kept for the test."""

    def __post_init__(self) -> None:
        for name in ("valid_share", "test_share"):
            require(0 < getattr(self, name) < 0.5, f"{name} must lie between 0 and 0.5, got {getattr(self, name)}")


@dataclass(frozen=True)
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
        require(
            self.max_length >= self.min_length,
            f"max_length must be at least min_length, got {self.max_length} and {self.min_length}",
        )
        require(self.colours >= 2, f"colours must be at least 2, got {self.colours}")
        require(self.distractors >= 1, f"distractors must be at least 1, got {self.distractors}")
        for name in ("distractor_prob", "blank_prob"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")

    @property
    def farthest(self) -> int:
        """The most steps back that an answer hangs on: from the question to the cue."""
        return self.max_length + 1


@dataclass(frozen=True)
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
    """Draws that each value is the mean of; neighbours share all but one."""
    margin: float = 0.2
    """No value lies nearer than this to 0 or to 1, so that nothing hangs on the exact place of an edge."""
    levels: int = 4
    """Tokens for each unit of the series: what a decoder reads of a value."""

    def __post_init__(self) -> None:
        for name in ("min_length", "max_count", "smooth", "levels"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.max_length >= self.min_length,
            f"max_length must be at least min_length, got {self.max_length} and {self.min_length}",
        )
        require(self.spread > 0, f"spread must be greater than 0, got {self.spread}")
        require(0 <= self.margin < 0.5, f"margin must lie in [0, 0.5), got {self.margin}")

    @property
    def farthest(self) -> int:
        """The most steps back that an answer hangs on: to the first value."""
        return self.max_length - 1


@dataclass(frozen=True)
class WordsTask:
    """Predict the next word of a text file, or of built-in little tales."""

    kind: Literal["words"] = "words"
    path: str = ""
    """File of text; empty takes built-in tales, in which things said early matter late."""
    words: int = 5000
    """Vocabulary: so many of the commonest words and marks of the training part; all others are "unknown"."""
    tales: int = 2000
    """How many tales are told, where no file is given."""
    valid_share: float = 0.05
    """Share of the words, after the training words, that is kept for validation."""
    test_share: float = 0.05
    """Share of the words, at the very end, that is kept for the test."""

    def __post_init__(self) -> None:
        for name in ("words", "tales"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("valid_share", "test_share"):
            require(0 < getattr(self, name) < 0.5, f"{name} must lie between 0 and 0.5, got {getattr(self, name)}")


TaskConfig = TextTask | RecallTask | EntrancesTask | WordsTask
"""Any task's config; each has a literal `kind`."""
OUTSIDE_TASKS: dict[str, type] = {}
"""Config classes that users registered from outside the package, by kind (see expire_span.tasks.registry)."""
