"""What a stream asks of a model. A decoder that was trained here answers in decoders.py, a retrofitted model in hf/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expire_span.models.mixer import MixerAux
from expire_span.models.slot_step import StreamPosition
from expire_span.models.state import map_tensors, select_rows
from expire_span.store import ExpiringMemory, Store
from expire_span.store.slot_memory import SlotMemory


@dataclass(frozen=True)
class Prefilled:
    """Prompts of equal length that have been read, wholly or up to some token, as a batch."""

    logits: Tensor
    """Logits of the next token, [B, V]."""
    state: list[Any]
    """The memories of each layer."""
    reports: Sequence[MixerAux] = ()
    """What each layer reported about the last chunk."""
    reader: Any = None
    """The model that read them; None where it is not known."""


@dataclass(frozen=True)
class Observed:
    """Tokens [T] of one row that have been read, with all that a picture of its memories shows."""

    logits: Tensor
    """Logits after each token, [T, V]."""
    state: list[Any]
    """The memories of each layer after the last token."""
    reports: Sequence[MixerAux]
    """What each layer reported. Spans are those that the tokens have, counted by one ramp in all layers."""


def trimmed(read: Prefilled) -> Prefilled:
    """A copy that holds what is alive and shares no tensor with a state that goes on; without reports."""
    state = map_tensors(read.state, torch.Tensor.clone, _trim)
    return Prefilled(read.logits.clone(), state, reader=read.reader)


def _trim(store: Store) -> Store:
    return store.trimmed() if isinstance(store, ExpiringMemory) else store.map_tensors(torch.Tensor.clone)


def row_of(read: Prefilled, row: int) -> Prefilled:
    """One of several prompts that were read together, as if it had been read alone."""
    if len(read.logits) == 1:
        return read
    picked = torch.tensor([row], device=read.logits.device)
    return Prefilled(read.logits[row : row + 1], select_rows(read.state, picked), reader=read.reader)


class Stepper(Protocol):
    """One decoding step of all layers over buffers of static shapes, for a number of rows."""

    clock: StreamPosition
    layers: Any
    """For each layer an object with `memory`, its `SlotMemory` or None, `memories(part)`, which finds the memories in a layer's
    state, and `load(rows, ..)`, which takes them over; without slots, `load` takes the layer's state."""
    memories: list[SlotMemory]
    """Those of the layers that have slots."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Read one token per row, tokens [B], and return logits [B, V]. The caller advances the clock."""
        ...

    def prepare(self) -> str:
        """Do the host's part of the next step, and name the device's: steps of one name do the same there."""
        ...

    def compact(self) -> None:
        """Delete dead memories and begin the clock's next epoch, by work on the device only."""
        ...

    def begin(self, rows: list[int], state: list[Any]) -> None:
        """Take note that these rows go on from a state, whose memories the layers have loaded."""
        ...

    def clear(self, rows: list[int]) -> None:
        """Empty the memories of these rows, which begin anew."""
        ...

    def to_state(self) -> list[Any] | None:
        """The memories of all rows as `prefill` takes them; None where memories in slots, or those of rows that have read
        unequally many tokens, cannot be given back."""
        ...

    def row_state(self, row: int) -> list[Any]:
        """What one row holds, as `prefill` takes it. The host waits for the device."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that steps change, by name, with the batch row in dimension 0."""
        ...


class StreamModel(Protocol):
    """A causal language model that reads tokens into a state, and can be stepped over buffers of static shapes, or not."""

    device: torch.device
    vocab: int
    layers: int
    can_step: bool
    """Whether all its layers have memories of static shapes."""
    prefers_steps: bool
    """Whether steps of static shapes are faster than ordinary calls on its device."""
    reads_in_step: bool
    """Whether short prompts of unequal lengths are read faster by steps than by ordinary calls."""
    length: int | None
    """Most tokens that a row may read; None where there is no limit."""
    rounding: float
    """Largest difference of logits, relative to the largest logit, that rounding explains in float32 on a CPU."""

    @property
    def beginning(self) -> tuple[int, ...]:
        """Tokens with which its contexts begin."""
        ...

    @property
    def trial(self) -> int:
        """Number of tokens that `verify` reads where nobody says how many."""
        ...

    @property
    def row_bytes(self) -> int:
        """Least number of bytes that a row occupies."""
        ...

    @property
    def token_bytes(self) -> int:
        """Least number of bytes that each token of `undeleted` occupies."""
        ...

    def fingerprint(self) -> str:
        """A hash of everything that its memories depend on."""
        ...

    @property
    def capped(self) -> bool:
        """Whether a cap evicts living memories: what is kept then depends on the chunks in which tokens were read."""
        ...

    def check_marks(self, marks: Tensor) -> None:
        """Raise ValueError where the model cannot give tokens these lifetimes, marks [T]."""
        ...

    def prefill(self, tokens: Tensor, state: list[Any] | None = None, marks: Tensor | None = None) -> Prefilled:
        """Read tokens [B, T] in chunks, after those that the state has read, which stays as it is. marks [B, T]: lifetimes of
        single tokens (models/marks.py)."""
        ...

    def observe(self, tokens: Tensor, state: list[Any] | None = None) -> Observed:
        """Read tokens [T] of one row in one call, after those that the state has read, which stays as it is."""
        ...

    def undeleted(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T] that are read at once, with nothing deleted."""
        ...

    def stepper(self, rows: int) -> Stepper: ...
