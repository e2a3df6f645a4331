"""Slots: keys and values of living memories in buffers of fixed size, changed in place. Streams decode from them.

Every row and key/value head has `FRESH` fresh slots for the memories born since the last compaction, followed by `capacity`
older slots for the memories that survived it. One step writes its memory into the same fresh slot of all rows and heads, so
that appending is one copy; the index of that slot, 0 to `FRESH` - 1, is called the `column`. After `FRESH` steps, `compact`
deletes the dead memories and moves the living ones to the older slots. It consists of tensor operations of fixed shapes that
never wait for the device, so that it can be recorded as a CUDA graph; ops/triton/compaction.py does the same as one kernel. One
row in memory:

    head 0: [fresh slots | older slots, counts[0] of capacity[0] in use], head 1: [fresh slots | ..], ..

Positions count from the last compaction (a memory in an older slot has a negative one), so that they never grow large and
float32 holds them exactly. ops/rule.py says which memories are dead. An empty slot has a span of minus infinity. Older slots
are in no particular order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expire_span.ops.rule import NEVER, is_alive, steps_left, until_dead

from .order import find_weakest

FRESH = 32
"""Number of steps, and so of memories appended per head, between two compactions."""
DEAD = float("-inf")
"""The span of an empty slot."""
OLDEST = -(2**29)
"""Earliest position of a slot's memory, where counting down in float32 ends too. Only memories that are kept for ever get
there, and their age no longer matters."""
KEPT = float(2**62)
"""Span of memories that never expire, longer than any stream; those above half of it are kept too."""
ROUND = 64
"""Capacities are multiples of this."""


def choose_capacity(needed: int, limit: int) -> int:
    """Number of older slots for a head that will need `needed` of them: a quarter more, at most `limit`, rounded up."""
    wanted = min(needed + needed // 4, max(limit, needed))
    return max(ROUND, -(-wanted // ROUND) * ROUND)


def smallest_bytes(heads: int, head_dim: int, element: int) -> int:
    """Bytes of one row of a layer with the smallest number of slots, for keys and values of `element` bytes a number."""
    return heads * (FRESH + ROUND) * (2 * head_dim * element + 8)


class Slots:
    """Memories of `rows` batch rows and len(capacity) key/value heads; `capacity` gives the older slots of each head.

    Fields: k, v [rows, total, D], pos and span [rows, total], with the slots of all heads one after another.
    """

    def __init__(
        self,
        rows: int,
        head_dim: int,
        capacity: Sequence[int],
        *,
        ramp: float,
        cap: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.head_dim, self.ramp, self.cap = rows, head_dim, ramp, cap
        self.capacity = tuple(capacity)
        self.starts = [0]
        """First slot of each head, and the slot after the last head's."""
        for size in self.capacity:
            self.starts.append(self.starts[-1] + FRESH + size)
        total = self.starts[-1]
        self.k = torch.zeros(rows, total, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.pos = torch.zeros(rows, total, device=device)
        self.span = torch.full((rows, total), DEAD, device=device)
        self.counts = torch.zeros(rows, self.heads, dtype=torch.int32, device=device)
        """Older slots in use, [rows, heads]."""
        self.evicted = torch.zeros(rows, self.heads, dtype=torch.int64, device=device)
        """Living memories that the cap removed, [rows, heads]."""
        self._index_slots(torch.device(device))

    def _index_slots(self, device: torch.device) -> None:
        """Build index tensors that say to which head each slot belongs and where that head's slots begin and end."""
        sizes = torch.tensor([FRESH + size for size in self.capacity])
        starts = torch.tensor(self.starts[:-1])
        self.bounds = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self._head = torch.repeat_interleave(torch.arange(self.heads), sizes).to(device)  # [total]
        self._index = torch.arange(self.total, device=device)
        self._first = (starts.to(device) + FRESH)[self._head]  # first older slot of the slot's head
        self._end = (starts + sizes).to(device)[self._head]
        self._last = (starts + sizes - 1).to(device)  # [heads]
        self._is_fresh = self._index < self._first
        self._column = (self._index - self._first + FRESH).to(torch.float32)
        self.pos.copy_(torch.where(self._is_fresh, self._column, 0.0))

    @property
    def heads(self) -> int:
        return len(self.capacity)

    @property
    def total(self) -> int:
        """Number of slots of one row, over all heads."""
        return self.starts[-1]

    @property
    def uniform(self) -> bool:
        """Whether all heads have equally many slots, so that a row is a rectangle."""
        return len(set(self.capacity)) == 1

    def tensors(self) -> dict[str, Tensor]:
        """All tensors that steps change, by name, with the batch row in dimension 0."""
        return {name: getattr(self, name) for name in ("k", "v", "pos", "span", "counts", "evicted")}

    # Reading

    def by_head(self, x: Tensor, width: int | None = None) -> Tensor:
        """A field [rows, total, ..] as [rows, heads, width, ..]; a view where all heads have equally many slots.

        width: slots to read of each head, from its first fresh slot on; None reads all. Where a head has fewer slots than that,
        its last slot is read again: the caller must treat these copies as dead, as `left` does.
        """
        width = FRESH + max(self.capacity) if width is None else width
        if self.uniform:
            return x.view(self.rows, self.heads, -1, *x.shape[2:]).narrow(2, 0, width)
        place = torch.arange(width, device=x.device) + self.bounds[:-1, None]
        place = torch.minimum(place, self._last[:, None])
        return x.index_select(1, place.flatten()).unflatten(1, (self.heads, width))

    def left(self, column: int | Tensor, width: int | None = None) -> Tensor:
        """Steps that each memory has left for a query at the fresh slot `column`, [rows, heads, width]; dead where <= 0."""
        span, pos = self.by_head(self.span, width), self.by_head(self.pos, width)
        left = until_dead(span + (pos - column), self.ramp)
        if self.uniform:
            return left
        inside = torch.arange(left.shape[2], device=left.device) < self.bounds.diff()[:, None]
        return left.masked_fill(~inside, DEAD)

    def live(self, column: int) -> Tensor:
        """Number of memories that are alive for a query at `column`, [rows, heads]."""
        return (self.left(column) > 0).sum(-1)

    # Changing

    def append(self, k: Tensor, v: Tensor, span: Tensor, column: int) -> None:
        """Write one memory of each row and head, k, v [rows, heads, D] and span [rows, heads], into the fresh slot `column`."""
        if self.uniform:
            shape = (self.rows, self.heads, FRESH + self.capacity[0])
            self.k.view(*shape, -1).select(2, column).copy_(k)
            self.v.view(*shape, -1).select(2, column).copy_(v)
            self.span.view(shape).select(2, column).copy_(span)
            return
        place = (self.bounds[:-1] + column).to(torch.int64)
        self.k.index_copy_(1, place, k.to(self.k.dtype))
        self.v.index_copy_(1, place, v.to(self.v.dtype))
        self.span.index_copy_(1, place, span)

    def evict(self, column: int | Tensor) -> None:
        """After one append, evict a memory of every head that has more than `cap` alive for a query at `column`."""
        if self.cap is None:
            return
        left, pos = self.left(column), self.by_head(self.pos)
        place, living = find_weakest(left, pos)
        place = place.clamp(max=FRESH + max(self.capacity) - 1) + self.bounds[:-1]
        over = living > self.cap
        self.span.scatter_(1, place, torch.where(over, DEAD, self.span.gather(1, place)))
        self.evicted += over

    def compact(self) -> None:
        """Delete what is dead for the next query, once all `FRESH` fresh slots are full, and move the rest to older slots.

        Memories that do not fit there are lost, so the caller must grow `capacity` in time: see `Slots.grown`.
        """
        alive = is_alive(self.span + (self.pos - FRESH), self.ramp)  # [rows, total]
        upto = alive.cumsum(1)
        before = torch.nn.functional.pad(upto, (1, 0))[:, self._first - FRESH]  # living in the heads before the slot's
        target = self._first + (upto - before - 1)
        fits = alive & (target < self._end)
        # `total` is one slot too far: what is written there is discarded.
        target = torch.where(fits, target, self.total)
        source = torch.zeros(self.rows, self.total + 1, dtype=torch.int64, device=alive.device)
        source = source.scatter_(1, target, self._index.expand_as(target))[:, : self.total]
        counts = (upto - before)[:, self._last]
        self.counts.copy_(counts)
        filled = (self._index - self._first < counts[:, self._head]) & ~self._is_fresh
        wide = source.unsqueeze(2).expand(-1, -1, self.head_dim)
        self.k.copy_(self.k.gather(1, wide))
        self.v.copy_(self.v.gather(1, wide))
        pos = torch.where(self._is_fresh, self._column, self.pos.gather(1, source) - FRESH)
        self.pos.copy_(pos)
        self.span.copy_(self.span.gather(1, source).masked_fill_(~filled, DEAD))

    def clear(self, rows: Tensor) -> None:
        """Forget everything that the rows with these indices hold."""
        self.span.index_fill_(0, rows, DEAD)
        self.counts.index_fill_(0, rows, 0)
        self.evicted.index_fill_(0, rows, 0)

    def load(
        self,
        rows: Tensor,
        column: int,
        k: Tensor,
        v: Tensor,
        span: Tensor,
        pos: Tensor,
        now: int,
        *,
        widest: list[int],
    ) -> None:
        """Replace all memories of the rows with the indices `rows` [n] by memories that other stores held.

        k, v [n, heads, S, D]; span and pos [n, 1 or heads, S], with position `NEVER` for empty slots. `now` is the position of
        the next query as pos counts, `column` the fresh slot that this query will use here. `widest` is what `count_living`
        finds for these memories; the caller must have made sure that so many fit. The host does not wait for the device.
        """
        span, pos = (x.expand(-1, self.heads, -1) for x in (span.float(), pos))
        alive = steps_left(span, pos, now, self.ramp) > 0
        self.clear(rows)
        counts = alive.sum(-1)
        self.counts[rows] = counts.to(torch.int32)
        order = (~alive).to(torch.int8).argsort(dim=-1, stable=True)  # the living first
        span = torch.where(alive, span, DEAD).gather(-1, order)
        born = torch.where(alive, (pos - now + column).clamp_min(OLDEST).float(), 0.0).gather(-1, order)
        for head, width in enumerate(widest):
            assert width <= self.capacity[head], (width, self.capacity)
            place = slice(self.starts[head] + FRESH, self.starts[head] + FRESH + width)
            pick = order[:, head, :width].unsqueeze(-1).expand(-1, -1, self.head_dim)
            self.k[rows, place] = k[:, head].gather(1, pick).to(self.k.dtype)
            self.v[rows, place] = v[:, head].gather(1, pick).to(self.v.dtype)
            self.span[rows, place] = span[:, head, :width]
            self.pos[rows, place] = born[:, head, :width]

    # Other sizes and rows

    def grown(self, capacity: Sequence[int]) -> Slots:
        """A copy with `capacity` older slots per head, none of which may be smaller than it is now."""
        new = Slots(
            self.rows, self.head_dim, capacity, ramp=self.ramp, cap=self.cap, dtype=self.k.dtype, device=self.k.device
        )
        place = self._index + (new.bounds[:-1] - self.bounds[:-1])[self._head]
        for name in ("k", "v", "pos", "span"):
            getattr(new, name).index_copy_(1, place, getattr(self, name))
        new.counts.copy_(self.counts)
        new.evicted.copy_(self.evicted)
        return new

    def selected(self, rows: Tensor) -> Slots:
        """A copy with these rows, kept, repeated or reordered."""
        new = Slots(
            len(rows),
            self.head_dim,
            self.capacity,
            ramp=self.ramp,
            cap=self.cap,
            dtype=self.k.dtype,
            device=self.k.device,
        )
        for name, x in self.tensors().items():
            getattr(new, name).copy_(x.index_select(0, rows))
        return new


def count_living(span: Tensor, pos: Tensor, now: int, ramp: float, heads: int) -> Tensor:
    """For each head, the largest number of living memories of any row, [heads], on their device; arguments as in
    `Slots.load`."""
    alive = steps_left(span.float(), pos, now, ramp) > 0
    if not alive.numel():
        return torch.zeros(heads, dtype=torch.int64, device=span.device)
    return alive.sum(-1).expand(-1, heads).amax(0)


def count_kept(span: Tensor) -> Tensor:
    """Number of memories that never expire, of the row and head that has most of them; spans [.., S]."""
    return (span > KEPT / 2).sum(-1).amax()


__all__ = ["DEAD", "FRESH", "KEPT", "NEVER", "Slots", "choose_capacity", "count_kept", "count_living", "smallest_bytes"]
