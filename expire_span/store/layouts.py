"""How a store lays its memories out: as a rectangle, or as segments of unequal length.

In a **rectangle** all rows have the same number of slots, so reading a field is a view; a row with fewer memories than the
widest has empty slots in front. In **segments** (segments.py) each row has as many slots as it needs, in flat buffers, and
reading gathers a rectangle. `compact` deletes dead memories and chooses the layout: segments where a rectangle would need more
than `MOST_PADDING` slots per living memory.

Appending writes into spare slots of buffers that several versions of a store share. Only the newest version, whose `used`
equals the shared `tail`, may write in place; an older version copies the buffers first. So buffers are shared only together
with their `tail`: `with_buffers` sees to that wherever a store is handed on. A block longer than half of what is
stored is not written into spare slots: old and new memories are concatenated into a new rectangle, and the next compaction
chooses the layout again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from expire_span.ops.rule import NEVER

from .order import blank, order_living_last, take_slots, wipe
from .segments import Segments

LEAST_SPARE = 32
"""Least number of spare slots, and so of memories that can be appended between two compactions."""
MOST_PADDING = 1.25
"""A rectangle may have at most this many slots per living memory; with more padding, segments are used."""


def spare_room(used: int, block: int) -> int:
    """Number of spare slots for a store with `used` slots in use, to which `block` memories are appended at a time.

    It is 0 where a block would not fit into the spare slots: then every block is followed by a compaction.
    """
    spare = max(used // 2, LEAST_SPARE)
    return spare if block <= spare else 0


@dataclass(frozen=True, eq=False)
class Layout(ABC):
    """Named buffers with one slot per memory: `pos`, `span` and any further fields."""

    rows: tuple[int, ...]
    """(B,), or (B, Hkv) where each key/value head has memories of its own."""
    buffers: dict[str, Tensor]
    used: int = 0
    """Number of slots in use in the row that has most of them, empty slots in front included."""
    packed: int = 0
    """Value of `used` right after the last compaction."""
    tail: list[int] = field(default_factory=lambda: [0])
    """Number of slots written in the shared buffers: one mutable number for all layouts that share them."""

    @property
    @abstractmethod
    def capacity(self) -> int:
        """Number of slots that the widest row may use before the buffers must grow."""

    @property
    def typical(self) -> int:
        """Number of slots of the average row right after the last compaction."""
        return self.packed

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """One field of the slots in use, [*rows, used, ..]."""

    @abstractmethod
    def write(self, new: dict[str, Tensor], used: int, count: int) -> None:
        """Write `count` new memories per row, in place, behind the `used` slots that are in use."""

    @abstractmethod
    def with_room(self, new: dict[str, Tensor], count: int) -> Layout:
        """A copy with spare slots for `count` more memories per row. `new` holds these memories: its keys name the fields."""

    @abstractmethod
    def flat_places(self, kept: Tensor) -> Tensor:
        """Convert flat indices into the rectangle [rows, used] to flat slot indices into the buffers."""

    @abstractmethod
    def as_rectangle(self) -> Rectangle:
        """The same memories as a rectangle, for operations on whole rows."""

    def append(self, new: dict[str, Tensor], count: int) -> Layout:
        """The layout with `count` more memories per row, whose fields `new` holds as [*rows, count, ..]."""
        if count > max(self.used // 2, LEAST_SPARE):
            return self._joined(new, count)
        fits = self.tail[0] == self.used and self.used + count <= self.capacity
        layout = self if set(new) == set(self.buffers) and fits else self.with_room(new, count)
        layout.write(new, self.used, count)
        layout.tail[0] = self.used + count
        return replace(layout, used=self.used + count)

    def _joined(self, new: dict[str, Tensor], count: int) -> Rectangle:
        """A new rectangle without spare slots: the stored memories followed by the new block.

        For blocks longer than half of what is stored. `expire` compacts after such a block, so spare slots would be of no use.
        """
        dim, buffers = len(self.rows), {}
        for name, x in new.items():
            old = self.read(name) if self.used else x.detach().narrow(dim, 0, 0)
            buffers[name] = torch.cat([old, x.detach().to(old.dtype)], dim)
        used = self.used + count
        return Rectangle(self.rows, buffers, used, self.packed, [used])

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Layout:
        return self.with_buffers({name: fn(x) for name, x in self.buffers.items()})

    def with_buffers(self, buffers: dict[str, Tensor]) -> Layout:
        """The layout with other buffers. Where any is still an old one, as after `x.to(device)` on the same device, both
        layouts share `tail`, so that only one of them writes in place."""
        shared = any(_share_memory(x, self.buffers[name]) for name, x in buffers.items())
        return replace(self, buffers=buffers, tail=self.tail if shared else [self.used])

    def index_tensors(self) -> tuple[Tensor, ...]:
        """Tensors that say where each row lies in the buffers; a rectangle needs none."""
        return ()

    def compact(self, alive: Tensor, block: int) -> Layout:
        """Keep only the memories marked in `alive` [*rows, used]; the store receives blocks of `block` memories.

        The host waits for the device here, since the number of living memories decides the new size.
        """
        counts = alive.sum(-1).flatten()
        total, width = torch.stack([counts.sum(), counts.amax()]).tolist() if alive.numel() else (0, 0)
        if len(counts) * width > MOST_PADDING * total:
            return _compact_to_segments(self, alive, counts, total, width, block)
        return _compact_to_rectangle(self, alive, width, block)


@dataclass(frozen=True, eq=False)
class Rectangle(Layout):
    """Buffers [*rows, capacity, ..]."""

    @property
    def capacity(self) -> int:
        return self.buffers["pos"].shape[len(self.rows)]

    def read(self, name: str) -> Tensor:
        return self.buffers[name].narrow(len(self.rows), 0, self.used)

    def write(self, new: dict[str, Tensor], used: int, count: int) -> None:
        for name, x in new.items():
            self.buffers[name].narrow(len(self.rows), used, count).copy_(x.detach())

    def with_room(self, new: dict[str, Tensor], count: int) -> Rectangle:
        room, dim = count + spare_room(self.used + count, count), len(self.rows)
        buffers = {}
        for name, x in new.items():
            old = self.read(name) if self.used else x.new_empty(*self.rows, 0, *x.shape[dim + 1 :])
            buffers[name] = widen(old, room, dim)
        return replace(self, buffers=buffers, tail=[self.used])

    def flat_places(self, kept: Tensor) -> Tensor:
        return kept // self.used * self.capacity + kept % self.used

    def as_rectangle(self) -> Rectangle:
        return self

    def order_living_last(self) -> Rectangle:
        """Move empty slots to the front, keeping the order of the others."""
        order, room = order_living_last(self.read("pos") != NEVER), self.capacity - self.used
        buffers = {n: widen(take_slots(self.read(n), order), room, len(self.rows)) for n in self.buffers}
        return replace(self, buffers=buffers, tail=[self.used])


@dataclass(frozen=True, eq=False)
class SegmentLayout(Layout):
    """Flat buffers [slots, ..]; `segments` says where each row lies."""

    segments: Segments = field(kw_only=True)
    mean_packed: int = 0
    """Number of slots of the average row right after the last compaction."""

    @property
    def typical(self) -> int:
        return self.mean_packed

    @property
    def capacity(self) -> int:
        return self.segments.base + self.segments.room

    @cached_property
    def _places(self) -> Tensor:
        return self.segments.places(self.used)

    def read(self, name: str) -> Tensor:
        return self.buffers[name].index_select(0, self._places).unflatten(0, (*self.rows, self.used))

    def write(self, new: dict[str, Tensor], used: int, count: int) -> None:
        ends = self.segments.ends(used)
        place = (ends.unsqueeze(1) + torch.arange(count, device=ends.device)).flatten()
        for name, x in new.items():
            buffer = self.buffers[name]
            buffer.index_copy_(0, place, x.detach().to(buffer.dtype).flatten(0, len(self.rows)))

    def with_room(self, new: dict[str, Tensor], count: int) -> SegmentLayout:
        old = self.segments
        added = self.used - old.base
        room = count + spare_room(self.typical + self.used - self.packed + count, count)
        counts, total = old.counts + added, old.total + added * len(old.counts)
        moved = Segments.lay_out(counts, total, self.used, room)
        source, target = replace(moved, starts=old.starts).slots(), moved.slots()
        buffers = {n: moved.fill(x.index_select(0, source), target, blank(n)) for n, x in self.buffers.items()}
        return replace(self, buffers=buffers, segments=moved, tail=[self.used])

    def flat_places(self, kept: Tensor) -> Tensor:
        return self._places[kept]

    def as_rectangle(self) -> Rectangle:
        buffers = {name: self.read(name) for name in self.buffers}
        return Rectangle(self.rows, buffers, self.used, self.packed, [self.used])

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Layout:
        moved = replace(self.segments, starts=fn(self.segments.starts), counts=fn(self.segments.counts))
        return replace(super().map_tensors(fn), segments=moved)

    def index_tensors(self) -> tuple[Tensor, ...]:
        return self.segments.starts, self.segments.counts


def _compact_to_rectangle(layout: Layout, alive: Tensor, width: int, block: int) -> Rectangle:
    order = order_living_last(alive)[..., layout.used - width :]
    alive = alive.gather(-1, order)
    spare, dim = spare_room(width, block), len(layout.rows)
    buffers = {n: widen(wipe(take_slots(layout.read(n), order), alive, blank(n)), spare, dim) for n in layout.buffers}
    return Rectangle(layout.rows, buffers, width, width, [width])


def _compact_to_segments(layout: Layout, alive: Tensor, counts: Tensor, total: int, width: int, block: int):
    """Keep each row's living memories in their order, without padding."""
    typical = -(-total // len(counts))
    segments = Segments.lay_out(counts, total, width, spare_room(typical, block))
    source, target = layout.flat_places(alive.flatten().nonzero().squeeze(1)), segments.slots()
    lead = len(layout.rows) + 1 if isinstance(layout, Rectangle) else 1
    buffers = {}
    for name, x in layout.buffers.items():
        flat = x.flatten(0, lead - 1)
        buffers[name] = segments.fill(flat.index_select(0, source), target, blank(name))
    return SegmentLayout(layout.rows, buffers, width, width, [width], segments=segments, mean_packed=typical)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def widen(x: Tensor, room: int, dim: int) -> Tensor:
    """A copy of x with `room` more slots along `dim`, zero until they are written."""
    shape = list(x.shape)
    shape[dim] += room
    out = x.new_zeros(shape)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
