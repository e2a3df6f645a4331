"""`SlotMemory`: one layer's memories in `Slots` that are replaced by larger ones when they must. Every layer that decodes over
slots holds one, whether the model was trained here or retrofitted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .memory import ExpiringMemory
from .slots import FRESH, NEVER, Slots, choose_capacity, count_kept, count_living

if TYPE_CHECKING:
    from expire_span.ops.triton.slot_tiles import Division


class Memories(NamedTuple):
    """A layer's memories as `Slots.load` takes them: k, v [n, Hkv, S, D], span and pos [n, 1 or Hkv, S], and the position
    `now` of the next query."""

    k: Tensor
    v: Tensor
    span: Tensor
    pos: Tensor
    now: int


class SlotMemory:
    """The slots of one layer, the views of them that a step uses, and the host's knowledge of how many are in use."""

    _division: tuple[Any, Any] = (None, None)
    slots: Slots

    def __init__(
        self, heads: int, head_dim: int, *, ramp: float, cap: int | None, limit: int, fused: bool, like: Tensor
    ) -> None:
        """limit: the most memories that a row and head can hold, not counting those that are kept for ever; fused: whether
        kernels read the slots; like: a tensor with their dtype and device."""
        self.heads, self.head_dim, self.limit, self.fused = heads, head_dim, limit, fused
        self._unmarked = limit
        self._settings: dict[str, Any] = dict(ramp=ramp, cap=cap, dtype=like.dtype, device=like.device)
        self.most: list[int] = [0] * heads
        """For each head, the most older slots that any row had in use after the last compaction."""

    def allocate(self, rows: int, capacity: list[int] | None = None) -> None:
        """Create empty slots with `capacity` older slots per head; None takes the smallest capacity."""
        self.slots = Slots(rows, self.head_dim, capacity or self.capacity_for([0] * self.heads), **self._settings)
        self._adopt()

    def capacity_for(self, needed: list[int]) -> list[int]:
        """Number of older slots per head with room for `needed` memories and for all that the fresh slots can hold."""
        wanted = [choose_capacity(n + FRESH, self.limit) for n in needed]
        return wanted if self.fused else [max(wanted)] * len(wanted)  # plain PyTorch reads a rectangle

    def make_room(self, needed: list[int]) -> bool:
        """Grow the slots if `needed` memories and those of the fresh slots might not fit; returns whether they were grown."""
        have = self.slots.capacity
        if all(min(n + FRESH, self.limit) <= size for n, size in zip(needed, have)):
            return False
        wanted = self.capacity_for([max(n, old) for n, old in zip(needed, self.most)])
        self.slots = self.slots.grown([max(a, b) for a, b in zip(have, wanted)])
        self._adopt()
        return True

    def _adopt(self) -> None:
        """Make the views of the slots that every step uses, after the slots were created or grown."""
        s = self.slots
        self.fields = (s.k, s.v, s.pos, s.span, s.counts, s.bounds)
        if self.fused:
            return
        assert s.uniform
        shape = (s.rows, s.heads, FRESH + s.capacity[0])
        self.k, self.v = s.k.view(*shape, -1), s.v.view(*shape, -1)
        self.spans, self.births = s.span.view(shape), s.pos.view(shape)
        self.refresh()

    def refresh(self) -> None:
        """On a CPU, limit what steps read to the older slots that can be in use, by the host's count."""
        if self.fused:
            return
        width = FRESH + max(self.most) if self.slots.k.device.type == "cpu" else self.k.shape[2]
        self.reading = [x.narrow(2, 0, width) for x in (self.k, self.v, self.spans, self.births)]

    def store(self, keys: Tensor, values: Tensor, span: Tensor, column: int) -> None:
        """Write the memory of one step, keys and values [rows, Hkv, D] and span [rows or 1, Hkv], by plain PyTorch."""
        for buffer, x in ((self.k, keys), (self.v, values), (self.spans, span)):
            buffer.select(2, column).copy_(x)

    def compact(self) -> None:
        """Delete dead memories, once all fresh slots are full. Only work on the device is done here."""
        if not self.fused:
            self.slots.compact()
            return
        from expire_span.ops.triton import triton_compact
        from expire_span.ops.triton.slots import Fields

        triton_compact(Fields(*self.fields), FRESH, self.slots.ramp)

    def note_counts(self, counts: Tensor) -> None:
        """Take note of the older slots in use after a compaction: counts [rows, Hkv], on the host."""
        self.most = counts.amax(0).tolist()
        self.refresh()

    def count(self, found: Memories) -> Tensor:
        """For each head, the largest number of living memories of any row, and behind them the number of those that are kept
        for ever, [Hkv + 1], on the device."""
        living = count_living(found.span, found.pos, found.now, self.slots.ramp, self.heads)
        return torch.cat([living, count_kept(found.span).to(living.dtype).view(1)])

    def allow(self, kept: int) -> None:
        """Let rows hold so many memories that are kept for ever."""
        self.limit = max(self.limit, self._unmarked + kept)

    def load(self, rows: Tensor, column: int, found: Memories, counts: list[int]) -> None:
        """Put memories into rows; counts: what `count` finds for them, for which room was made."""
        self.slots.load(rows, column, *found, widest=counts)
        self.most = [max(a, b) for a, b in zip(self.most, counts)]
        self.refresh()

    def to_memory(self, column: int, epoch: int, row: int | None = None) -> ExpiringMemory:
        """The living memories in order of birth, as an `ExpiringMemory`; rows with fewer of them have empty slots in front.
        epoch: position of the first fresh slot; row: the only row that is wanted."""
        s = self.slots if row is None else self.slots.selected(torch.tensor([row], device=self.slots.k.device))
        alive = s.left(column) > 0  # [B, Hkv, W]
        born = s.by_head(s.pos)
        order = torch.where(alive, born, -torch.inf).argsort(-1)[..., alive.shape[-1] - int(alive.sum(-1).max()) :]
        alive = alive.gather(-1, order)
        pos = torch.where(alive, born.gather(-1, order).long() + epoch, NEVER)
        span = torch.where(alive, s.by_head(s.span).gather(-1, order), 0.0)
        wide = order.unsqueeze(-1).expand(*order.shape, s.head_dim)
        fields = {name: s.by_head(x).gather(2, wide) for name, x in (("k", s.k), ("v", s.v))}
        fields = {name: x.masked_fill(~alive.unsqueeze(-1), 0) for name, x in fields.items()}
        memory = ExpiringMemory.empty(tuple(alive.shape[:2]), ramp=s.ramp, cap=s.cap, device=s.k.device)
        return memory.append(pos, span, check_values=False, **fields).expire(epoch + column)

    def division(self, group: int) -> Division:
        """How the kernel's programs divide the slots among them; made again when the slots or the tiles have changed."""
        from expire_span.ops.triton.slot_tiles import count_programs, divide, tiles

        s = self.slots
        made_for = (s.rows, s.capacity, group, tiles())
        if self._division[0] != made_for:
            programs = count_programs([FRESH + size for size in s.capacity], s.rows * group)
            self._division = made_for, divide(programs, group, s.rows, s.k.device)
        return self._division[1]
