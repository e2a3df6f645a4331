"""HiddenMemory: the hidden states of living memories, as training carries them from block to block.

Positions count from the start of the next block: a stored memory's position is negative, and none grows without bound. At the
end of a block, dead slots are cleared and moved to the front; the living ones follow in order of birth. The number of slots
does not depend on which memories died, so the host need not wait for the device, and a block can be compiled or recorded as a
CUDA graph. `trim_states` then cuts the empty slots off, for which the host waits for the device once per step, for all layers
at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.rule import NEVER, steps_left

from .interface import Store
from .order import find_living, order_living_last, take_slots, wipe


@dataclass(frozen=True, eq=False)
class HiddenMemory(Store):
    """Hidden states [B, S, C] and their positions [B, S]; an empty slot has the position `NEVER`."""

    layout_name = "steady"

    hidden: Tensor
    pos: Tensor
    evicted: Tensor
    """Number of living memories that the cap removed, per row [B]."""
    living: Tensor | None = None
    """Number of living memories of each row [B] right after a block; None once `trim_states` has cut off the empty slots."""
    block: int = 0
    """Number of tokens that the last block added."""

    @classmethod
    def empty(cls, batch: int, dim: int, *, dtype: torch.dtype, device: torch.device) -> HiddenMemory:
        hidden = torch.zeros(batch, 0, dim, dtype=dtype, device=device)
        pos = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return cls(hidden, pos, torch.zeros(batch, dtype=torch.int64, device=device))

    @property
    def bytes_held(self) -> int:
        parts = [self.hidden, self.pos, *([] if self.living is None else [self.living])]
        return sum(x.numel() * x.element_size() for x in parts)

    def extended(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """The stored memories followed by the block x [B, T, C] at pos [T]: hidden [B, S + T, C] and positions [B, S + T]."""
        hidden = torch.cat([self.hidden.to(x.dtype), x], 1)
        return hidden, torch.cat([self.pos, pos.expand(x.shape[0], -1)], 1)

    def after(
        self,
        hidden: Tensor,
        pos: Tensor,
        span: Tensor,
        *,
        block: int,
        ramp: float,
        cap: int | None,
        added: int | None = None,
    ) -> HiddenMemory:
        """The store after a block of `block` tokens: hidden and pos as `extended` returned them, with their spans [B, S +
        T]. added: number of tokens that were added here, where others hold the rest of the block."""
        alive, lost = find_living(steps_left(span, pos, block, ramp), cap)
        evicted = self.evicted if lost is None else self.evicted + lost
        kept = _living_last(hidden.detach(), pos - block, alive)
        return HiddenMemory(*kept, evicted, alive.sum(-1), block if added is None else added)

    def forget_rows(self, rows: Tensor, start: HiddenMemory) -> HiddenMemory:
        """Replace the memories of the rows marked in `rows` [B] (bool) by those of `start`."""
        gone = rows.to(self.pos.device)[:, None]
        if not start.pos.shape[1]:  # rows become all empty, and empty slots need no order
            pos = self.pos.masked_fill(gone, NEVER)
            hidden = self.hidden.masked_fill(gone.unsqueeze(-1), 0)
            return HiddenMemory(hidden, pos, self.evicted, (pos != NEVER).sum(-1), self.block)
        alive = torch.cat([(self.pos != NEVER) & ~gone, (start.pos != NEVER) & gone], 1)
        hidden = torch.cat([self.hidden, start.hidden.to(self.hidden.dtype)], 1)
        kept = _living_last(hidden, torch.cat([self.pos, start.pos], 1), alive)
        return HiddenMemory(*kept, self.evicted, alive.sum(-1), self.block)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> HiddenMemory:
        living = None if self.living is None else fn(self.living)
        return HiddenMemory(fn(self.hidden), fn(self.pos), fn(self.evicted), living, self.block)

    def select(self, rows: Tensor) -> HiddenMemory:
        return self.map_tensors(lambda x: x.index_select(0, rows.to(x.device)))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> HiddenMemory:
        return cls(**state)


def trim_states(states: list[Any], *, copy: bool = True) -> list[Any]:
    """Cut off the empty slots that all rows have in front, in the states of all layers at once.

    Layers whose state holds no `HiddenMemory` keep their state. copy: copy what remains, so that the bytes of the slots cut off
    are freed; without it the result is a view.
    """
    pending = [n for n, state in enumerate(states) if _is_pending(state)]
    if not pending:
        return states
    counts = torch.stack([states[n]["memory"].living for n in pending]).amax(-1).tolist()
    trimmed = list(states)
    for n, count in zip(pending, counts):
        trimmed[n] = {**states[n], "memory": _cut(states[n]["memory"], count, copy)}
    return trimmed


def _is_pending(state: Any) -> bool:
    memory = state.get("memory") if isinstance(state, dict) else None
    return isinstance(memory, HiddenMemory) and memory.living is not None


def _cut(memory: HiddenMemory, count: int, copy: bool) -> HiddenMemory:
    hidden, pos = memory.hidden, memory.pos
    width = choose_width(count, pos.shape[1] - memory.block, pos.shape[1])
    if width < pos.shape[1]:
        hidden, pos = (x[:, pos.shape[1] - width :] for x in (hidden, pos))
        hidden, pos = (hidden.contiguous(), pos.contiguous()) if copy else (hidden, pos)
    return replace(memory, hidden=hidden, pos=pos, living=None)


def choose_width(count: int, before: int, most: int) -> int:
    """Number of slots to keep for `count` living memories. It takes few different values, since each is a shape to compile.

    before: number of slots before the block was added, which is kept unless it is over 1.5 times what is needed;
    most: number of slots now.
    """
    step = max(8, 1 << max(count.bit_length() - 4, 0))
    want = -(-count // step) * step
    kept = before if want <= before <= want + want // 2 else want
    return min(kept, most)


def _living_last(hidden: Tensor, pos: Tensor, alive: Tensor) -> tuple[Tensor, Tensor]:
    """Move living slots to the end, in their order; clear the others, which come first."""
    order = order_living_last(alive)
    alive = alive.gather(-1, order)
    return wipe(take_slots(hidden, order), alive), wipe(pos.gather(-1, order), alive, NEVER)
