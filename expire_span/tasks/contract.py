"""The contract of a supervised task: it gives batches, names its score, and shows samples. A task knows nothing of models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


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
    sizes: Tensor | None = None
    """Number of bytes of each target, [B, T]; None where the score is a mean over positions."""

    @property
    def units(self) -> int:
        """The number over which the score of this block is a mean: the bytes of its scored targets, or their number."""
        return int(self.mask.sum()) if self.sizes is None else int(self.sizes[self.mask].sum())


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


@dataclass(frozen=True)
class TaskSample:
    """A piece of the test split that a report shows."""

    tokens: Tensor
    """[T], int64."""
    labels: list[str]
    """A short printable label for each token."""
    marks: dict[int, str] = field(default_factory=dict)
    """Positions to highlight, with the word written beside each."""
    is_text: bool = False
    """Whether the tokens are the bytes of a text, so that neighbours join to words."""


class Task(Protocol):
    vocab: int
    score: Score

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> BatchStream: ...

    def score_of(self, nll: float, correct: float, count: float) -> float:
        """The score from summed negative log-likelihood (nats), correct predictions and scored positions, or their bytes."""
        ...

    def show(self, tokens: Tensor) -> list[str]:
        """A short printable label for each token of [T], for reports."""
        ...

    def sample(self, *, seed: int) -> TaskSample:
        """One sample of the test split with its labels and marks, for reports."""
        ...


def bits(nll: float, count: float) -> float:
    """Bits per scored token."""
    return nll / max(count, 1) / math.log(2)


def sample_stretch(task: Task, length: int, *, seed: int, is_text: bool = False) -> TaskSample:
    """The first tokens of the test split, at most `length` of them."""
    batch = next(iter(task.stream("test", batch=1, block=length, seed=seed)))
    tokens = batch.x[0]
    return TaskSample(tokens, task.show(tokens), is_text=is_text)


def sample_episode(task: Task, longest: int, *, seed: int, prefixes: tuple[str, ...], episodes: int = 16) -> TaskSample:
    """The longest of a few test episodes, with a mark wherever a label begins with one of the prefixes.

    An episode that contains the first prefix is preferred, since it has something to remember.
    """
    stream = task.stream("test", batch=1, block=longest, seed=seed)
    found = [batch.x[0] for batch, _ in zip(stream, range(episodes))]
    labelled = [TaskSample(tokens, task.show(tokens)) for tokens in found]
    with_first = [s for s in labelled if any(label.startswith(prefixes[0]) for label in s.labels)]
    best = max(with_first or labelled, key=lambda s: len(s.labels))
    marks = {n: label for n, label in enumerate(best.labels) if label.startswith(prefixes)}
    return TaskSample(best.tokens, best.labels, marks)
