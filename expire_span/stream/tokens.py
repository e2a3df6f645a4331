"""What a stream returns for each step, and tokens that are being copied from the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

NOTHING = -1
"""Stands for a missing token, in rows that are idle or were replaced while the step was running."""


class Events(NamedTuple):
    """What happened in one layer in one step. Positions count the stream's tokens, as `Stream.position` does."""

    born: Tensor
    """Spans of the memories that the step's tokens became, [rows, heads]; NaN for rows that are idle. A layer that keeps no
    slots (a recurrent one, or any layer of a stream without `static_shapes`) has no heads here."""
    died: list[tuple[int, int, int]]
    """Row, head and position of birth of every memory that was alive for this step's query and is dead for the next."""


class Step(NamedTuple):
    """One token of each row."""

    tokens: Tensor
    """[rows] on the host; `NOTHING` (-1) for rows that are idle or were replaced while the step was running."""
    events: list[Events] | None = None
    """One entry for each layer; None unless `generate` was called with events=True."""


@dataclass
class Flight:
    """Tokens that are being copied from the device to the host; `collect` waits for them."""

    tokens: Tensor
    event: torch.cuda.Event | None = None
    stale: set[int] = field(default_factory=set)
    """Rows that were replaced since the copy began: their tokens are dropped."""
    events: list[Events] | None = None

    def collect(self, active: list[bool]) -> Step:
        if self.event is not None:
            self.event.synchronize()
        tokens = self.tokens.clone()
        if self.stale or not all(active):
            for row, is_active in enumerate(active):
                if row in self.stale or not is_active:
                    tokens[row] = NOTHING
        return Step(tokens, self.events)


def send_to_host(tokens: Tensor) -> Flight:
    """Start to copy tokens [rows] to the host; from a GPU, without waiting for it."""
    if tokens.device.type != "cuda":
        return Flight(tokens.to("cpu", copy=True))
    host, event = torch.empty(len(tokens), dtype=tokens.dtype, pin_memory=True), torch.cuda.Event()
    host.copy_(tokens, non_blocking=True)
    event.record()
    return Flight(host, event)
