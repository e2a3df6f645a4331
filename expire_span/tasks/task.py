"""The contract of a supervised task: it gives batches and names its score. A task knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from expire_span.config import TaskConfig

Split = Literal["train", "valid", "test"]


@dataclass
class Batch:
    """One block for every row."""

    x: Tensor
    """Tokens [B, T], int64."""
    y: Tensor
    """Targets [B, T], int64."""
    mask: Tensor
    """Which positions are scored, [B, T], bool."""
    fresh: Tensor
    """Rows [B], bool, whose memory must be emptied before this block."""


class BatchStream(Protocol):
    """An endless (train) or finite (valid, test) iterator of batches whose place can be saved and restored exactly."""

    def __iter__(self) -> Iterator[Batch]: ...
    def __next__(self) -> Batch: ...
    def state_dict(self) -> dict[str, Any]:
        """The place in the data as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Score:
    """The name of a task's score and which way is better."""

    name: str
    higher_is_better: bool


class Task(Protocol):
    vocab: int
    score: Score

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> BatchStream: ...

    def score_of(self, nll: float, correct: float, count: float) -> float:
        """The score from summed negative log-likelihood (nats), correct predictions and scored positions."""
        ...

    def show(self, tokens: Tensor) -> list[str]:
        """A short printable label for each token of [T], for reports."""
        ...


def bits(nll: float, count: float) -> float:
    """Bits per scored token."""
    return nll / max(count, 1) / math.log(2)


def build_task(config: TaskConfig) -> Task:
    """The registry: one line per task."""
    if config.kind == "text":
        from .text import Text

        return Text(config)
    if config.kind == "recall":
        from .recall import Recall

        return Recall(config)
    if config.kind == "entrances":
        from .entrances import Entrances

        return Entrances(config)
    if config.kind == "words":
        from .words import Words

        return Words(config)
    raise ValueError(f"unknown task {config.kind!r}, known are: text, recall, entrances, words")
