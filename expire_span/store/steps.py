"""StepMemory: the memories of a layer while it reads single tokens without gradients and its weights stay the same.

`HiddenMemory` keeps hidden states alone, from which every block computes keys, values and spans anew. An agent that plays
changes no weight between two updates, so here each is computed once. Buffers have room for all steps; one that has expired is
no longer read, and `end` deletes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.rule import NEVER, steps_left

from .hidden import HiddenMemory
from .interface import Store


@dataclass(frozen=True, eq=False)
class StepMemory(Store):
    """Slots in order of birth, of which `used` are in use. A step writes into the next one in place, so that of several
    versions only the one whose step came last may go on."""

    layout_name = "steps"

    hidden: Tensor
    """[B, W, C]"""
    k: Tensor
    """[B, Hkv, W, D], rotated."""
    v: Tensor
    span: Tensor
    """[B, 1 or Hkv, W]"""
    pos: Tensor
    """[B, W], counted from the first step; `NEVER` in empty slots."""
    evicted: Tensor
    angles: tuple[Tensor, Tensor] | None
    """Rotary angles of the steps, [steps, D / 2]; None where positions are not rotary."""
    ramp: float
    first: int
    """Number of slots in use before the first step."""
    used: int

    @classmethod
    def begin(
        cls,
        memory: HiddenMemory,
        k: Tensor,
        v: Tensor,
        span: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        ramp: float,
        steps: int,
    ) -> StepMemory:
        """What a memory holds, with keys, values and spans of it, and room for so many steps."""
        count = memory.pos.shape[1]
        widen = lambda x, dim, value=0: _widen(x, steps, dim, value)  # noqa: E731
        slots = (widen(memory.hidden, 1), widen(k, 2), widen(v, 2), widen(span, 2), widen(memory.pos, 1, NEVER))
        return cls(*slots, memory.evicted, angles, ramp, count, count)

    @property
    def now(self) -> int:
        """Position of the next step."""
        return self.used - self.first

    @property
    def bytes_held(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.hidden, self.k, self.v, self.span, self.pos))

    @property
    def living(self) -> Tensor:
        """Number of memories of each row that the next step can still read, [B]."""
        return (self._left() > 0).sum(-1)

    def _left(self) -> Tensor:
        """Steps until each memory is dead for all heads, counted from the next step, [B, used]."""
        longest = self.span[:, :, : self.used].amax(1)
        return steps_left(longest, self.pos[:, : self.used], self.now, self.ramp)

    def remaining(self, now: int) -> Tensor:
        """span - age of the memories in use, for a query at `now`, [B, 1 or Hkv, used]."""
        births = (self.pos[:, : self.used] - now).to(self.span.dtype)
        return self.span[:, :, : self.used] + births.unsqueeze(1)

    def add(self, hidden: Tensor, k: Tensor, v: Tensor, span: Tensor) -> StepMemory:
        """The store with one more memory in every row: hidden [B, 1, C], k and v [B, Hkv, 1, D], span [B, 1 or Hkv, 1]."""
        slot = slice(self.used, self.used + 1)
        self.hidden[:, slot], self.pos[:, slot] = hidden, self.now
        self.k[:, :, slot], self.v[:, :, slot], self.span[:, :, slot] = k, v, span
        return replace(self, used=self.used + 1)

    def forget_rows(self, rows: Tensor) -> StepMemory:
        """Empty the rows marked in `rows` [B] (bool)."""
        return replace(self, pos=self.pos.masked_fill(rows.to(self.pos.device)[:, None], NEVER))

    def end(self) -> HiddenMemory:
        """The hidden states of the living memories after the last step, as training carries them."""
        empty = HiddenMemory(self.hidden[:, :0], self.pos[:, :0], self.evicted)
        now, slots = self.now, slice(0, self.used)
        longest = self.span[:, :, slots].amax(1)
        return empty.after(self.hidden[:, slots], self.pos[:, slots], longest, block=now, ramp=self.ramp, cap=None)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> StepMemory:
        raise ValueError("memories of steps in progress cannot be moved or saved; end the steps first")

    def select(self, rows: Tensor) -> StepMemory:
        raise ValueError("memories of steps in progress cannot be reordered; end the steps first")

    def state_dict(self) -> dict[str, Any]:
        raise ValueError("memories of steps in progress cannot be saved; end the steps first")


def _widen(x: Tensor, room: int, dim: int, value: int) -> Tensor:
    """A copy of x with `room` more slots along `dim`, which hold `value`."""
    shape = list(x.shape)
    shape[dim] = room
    return torch.cat([x, x.new_full(shape, value)], dim)
