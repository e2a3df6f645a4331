"""The contract of a supervised task: it gives batches, names its score, and says how its tokens are written.

A task knows nothing of models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import Tensor

from expire_span.errors import UserError

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


class Codec(ABC):
    """How the tokens of a task are written. A codec opens the task's data only where its vocabulary depends on it."""

    unit: str
    """What a token is: a byte, a token (of a tokenizer), a character, a word, or, where nothing can be read, a symbol."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of kinds of tokens."""

    @abstractmethod
    def label(self, token: int) -> str:
        """One token as a short text without invisible letters."""

    def label_first(self, token: int) -> str:
        """The same for the first token of a text, which some tokenizers write without the space before it."""
        return self.label(token)

    @abstractmethod
    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        """The tokens [n] of a text; `source` names it in refusals."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """The text that tokens stand for."""

    def measure(self, raw: bytes, source: str = "the text") -> tuple[np.ndarray, np.ndarray | None]:
        """The tokens of a text, and the bytes [n] of each, None where a score per byte means nothing."""
        return self.encode(raw, source), None

    def writer(self, prompt: Sequence[int]) -> Callable[[int], bytes]:
        """A function that turns the tokens after a prompt into text, one by one."""
        return lambda token: self.decode([token])

    def show(self, tokens: Tensor) -> list[str]:
        """The label of each token of [T]."""
        return [self.label(token) for token in tokens.tolist()]


class Symbols(Codec):
    """Tokens that stand for steps or objects: they have labels, and are no text."""

    unit = "symbol"

    def __init__(self, size: int, label: Callable[[int], str]) -> None:
        self._size, self._label = size, label

    @property
    def size(self) -> int:
        return self._size

    def label(self, token: int) -> str:
        return self._label(token)

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        raise UserError("the task of this run reads no text; look at the task's sample instead")

    def decode(self, tokens: Sequence[int]) -> bytes:
        raise UserError("the task of this run writes no text; look at the task's sample instead")


class Task(Protocol):
    score: Score
    longest: int
    """Number of tokens of the longest episode; of an endless stream, of the part that is shown."""

    @property
    def codec(self) -> Codec:
        """How its tokens are written."""
        ...

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> BatchStream: ...

    def score_of(self, nll: float, correct: float, count: float) -> float:
        """The score from summed negative log-likelihood (nats), correct predictions and scored positions, or their bytes."""
        ...


def bits(nll: float, count: float) -> float:
    """Bits per scored token."""
    return nll / max(count, 1) / math.log(2)
