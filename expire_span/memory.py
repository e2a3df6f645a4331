"""ExpiringMemory: one layer's store of memories that are deleted for good when their span is over.

A store holds, for each of its rows, memories sorted by birth: a position, a span, and any named fields (hidden states in
training, keys and values in inference). Rows are independent: each keeps its own memories, and a row with fewer than the
widest has dead padding in front (`position NEVER`, span 0), so that new memories always go to the end.

Every operation returns a new store and leaves the old one valid. Appending writes into spare room of shared buffers and
costs the size of what is appended; expired memories are squeezed out once they could fill half of the room, so that the
copying is amortised and what is held stays within a constant factor of what lives. Blocks that would not fit into the
spare room get none: there each block is followed by a compaction.

Rows lie side by side as a rectangle while its padding is small, so that reading it is a view. Where rows differ more (heads of
one layer that remember a hundred steps and a thousand) they lie one behind the other in flat buffers, `Segments`, and what is
held follows what lives, row by row; reading then gathers a rectangle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from expire_span.segments import Segments

NEVER = -(2**40)
"""Position of an empty slot: a memory born so long ago that it is dead for every query."""

_SPARE = 32
"""Fewest appended memories between two compactions."""
_PADDING = 1.25
"""Rows are kept as a rectangle while it has at most so many times the slots of what lives."""


@dataclass(frozen=True, eq=False)
class ExpiringMemory:
    """Memories of `rows` = (B,) or (B, Hkv) independent rows. Build one with `ExpiringMemory.empty`."""

    rows: tuple[int, ...]
    ramp: float
    cap: int | None
    slots: dict[str, Tensor]
    """`pos` and `span` [*rows, capacity], and each field [*rows, capacity, ...]; the first `used` slots count.
    With segments, flat: [slots, ...]."""
    used: int = 0
    """Slots of the widest row."""
    packed: int = 0
    """How many that were after the last compaction."""
    typical: int = 0
    """The same for the mean of all rows; in a rectangle they are one."""
    segments: Segments | None = None
    """Where the rows lie, if not side by side."""
    block: int = 0
    """How many memories the last append added."""
    now: int = NEVER
    """The next query's position, as last told to `expire`: memories dead at it are gone."""
    evicted: Tensor | None = None
    """Living memories that the cap removed, per row: each is a departure from exactness."""
    tail: list[int] = field(default_factory=lambda: [0])
    """Slots taken in the shared buffers: only the store that ends there may append in place."""

    @classmethod
    def empty(
        cls, rows: int | tuple[int, ...], *, ramp: float, cap: int | None = None, device: torch.device | str = "cpu"
    ) -> ExpiringMemory:
        if not ramp > 0:
            raise ValueError(f"ramp must be greater than 0, got {ramp}")
        if cap is not None and cap < 1:
            raise ValueError(f"cap must be at least 1, got {cap}")
        rows = (rows,) if isinstance(rows, int) else tuple(rows)
        slots = {
            "pos": torch.empty(*rows, 0, dtype=torch.int64, device=device),
            "span": torch.empty(*rows, 0, device=device),
        }
        return cls(rows, ramp, cap, slots, evicted=torch.zeros(rows, dtype=torch.int64, device=device))

    # Reading

    def __len__(self) -> int:
        """Slots in use by the widest row, dead padding included."""
        return self.used

    @property
    def capacity(self) -> int:
        """Slots of a row, free ones included; of the widest, where rows differ."""
        if self.segments is not None:
            return self.segments.base + self.segments.room
        return self.slots["pos"].shape[len(self.rows)]

    @property
    def pos(self) -> Tensor:
        return self["pos"]

    @property
    def span(self) -> Tensor:
        return self["span"]

    def __getitem__(self, name: str) -> Tensor:
        """The used part of one field, [*rows, used, ...]: a view of a rectangle, or gathered from segments."""
        x = self.slots[name]
        if self.segments is None:
            return x.narrow(len(self.rows), 0, self.used)
        return x.index_select(0, self._places).unflatten(0, (*self.rows, self.used))

    def row_places(self) -> tuple[Tensor, Tensor, int, int]:
        """Of a store in segments: first slot and number of slots of each row, how many more each has, the most of a row."""
        assert self.segments is not None
        return self.segments.starts, self.segments.counts, self.used - self.segments.base, self.used

    @cached_property
    def _places(self) -> Tensor:
        """For each slot of the rectangle [rows, used], flattened: where it lies in the flat buffers."""
        assert self.segments is not None
        return self.segments.places(self.used)

    @property
    def fields(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self.slots if name not in ("pos", "span")}

    @property
    def bytes_held(self) -> int:
        """Bytes of all buffers, spare room included."""
        index = (self.segments.starts, self.segments.counts) if self.segments is not None else ()
        return sum(x.numel() * x.element_size() for x in (*self.slots.values(), *index))

    def remaining(self, now: int) -> Tensor:
        """Steps until each memory is dead, counted from a query at `now`; dead where <= 0. [*rows, used]."""
        left = self.span + self.ramp - (now - self.pos).to(self.span.dtype)
        return left.masked_fill(self.pos == NEVER, -torch.inf)

    def live(self, now: int | None = None) -> Tensor:
        """How many memories of each row are alive for a query at `now`, [*rows]."""
        return (self.remaining(self.now if now is None else now) > 0).sum(-1)

    # Changing

    def append(self, pos: Tensor, span: Tensor, **fields: Tensor) -> ExpiringMemory:
        """Add memories born after all stored ones. pos [n] or [*rows, n], span [*rows, n], fields [*rows, n, ...]."""
        count = span.shape[-1]
        new = {"pos": pos.expand(*self.rows, count), "span": span, **fields}
        self._check_append(new, count)
        store = self if self._has_room(new, count) else self._copy_with_room(new, count)
        store._write(new, self.used, count)
        store.tail[0] = self.used + count
        return replace(store, used=self.used + count, block=count)

    def expire(self, now: int) -> ExpiringMemory:
        """Delete what is dead for every query from position `now` on, and what the cap does not allow."""
        store = replace(self, now=now)._evict() if self.cap is not None else replace(self, now=now)
        due = store.used - store.packed >= max(store.typical // 2, _SPARE)
        return store.compact() if due else store

    def compact(self) -> ExpiringMemory:
        """Squeeze out the dead now. Waits for the device: how much lives decides how many slots remain."""
        alive = self.remaining(self.now) > 0
        counts = alive.sum(-1).flatten()
        total, width = torch.stack([counts.sum(), counts.amax()]).tolist() if alive.numel() else (0, 0)
        if len(counts) * width > _PADDING * total:
            return self._compact_segments(alive, counts, total, width)
        order = alive.to(torch.uint8).argsort(dim=-1, stable=True)[..., self.used - width :]  # dead ones first
        alive = alive.gather(-1, order)
        spare = _spare_room(width, self.block)
        slots = {name: _gather_slots(self[name], order, alive, spare) for name in self.slots}
        slots["pos"].narrow(-1, 0, width).masked_fill_(~alive, NEVER)
        return replace(self, slots=slots, used=width, packed=width, typical=width, segments=None, tail=[width])

    def _compact_segments(self, alive: Tensor, counts: Tensor, total: int, width: int) -> ExpiringMemory:
        """Keep each row's living memories, in order, and no padding."""
        kept = alive.flatten().nonzero().squeeze(1)
        typical = -(-total // len(counts))
        segments = Segments.lay_out(counts, total, width, _spare_room(typical, self.block))
        source, target, slots = self._flat_place(kept), segments.slots(), {}
        for name, x in self.slots.items():
            flat = x.flatten(0, len(self.rows)) if self.segments is None else x
            slots[name] = segments.fill(flat.index_select(0, source), target, _empty(name))
        changed = dict(slots=slots, used=width, packed=width, typical=typical, segments=segments, tail=[width])
        return replace(self, **changed)

    def _flat_place(self, kept: Tensor) -> Tensor:
        """Places [n] in the rectangle of used slots -> places in the flat buffers."""
        if self.segments is not None:
            return self._places[kept]
        return kept // self.used * self.capacity + kept % self.used

    def as_rectangle(self) -> ExpiringMemory:
        """The same store with rows side by side, for what works on whole rows."""
        if self.segments is None:
            return self
        return replace(self, slots={name: self[name] for name in self.slots}, segments=None, tail=[self.used])

    def with_span(self, span: Tensor) -> ExpiringMemory:
        """The same memories with newly predicted spans [*rows, used]; empty slots stay empty."""
        self = self.as_rectangle()
        fresh = torch.where(self.pos == NEVER, 0, span.detach()).to(self.slots["span"].dtype)
        room = self.slots["span"].new_zeros(*self.rows, self.capacity - self.used)
        return replace(self, slots=self.slots | {"span": torch.cat([fresh, room], -1)})

    def forget_rows(self, rows: Tensor) -> ExpiringMemory:
        """Empty the batch rows marked in `rows` [B] (bool)."""
        self = self.as_rectangle()
        gone = rows.to(self.pos.device).reshape(-1, *(1 for _ in self.rows))
        slots = {
            name: torch.where(
                gone.reshape(gone.shape + (1,) * (x.dim() - gone.dim())), NEVER if name == "pos" else 0, x
            )
            for name, x in self.slots.items()
        }
        return replace(self, slots=slots, tail=[self.used])

    def join(self, later: ExpiringMemory) -> ExpiringMemory:
        """Add all memories of another store with the same rows, born after this one's in every row."""
        return self.as_rectangle().append(later.pos, later.span, **later.fields)._dead_first()

    def rebase(self, offset: int) -> ExpiringMemory:
        """Count positions from `offset` on, so that an endless stream keeps small numbers."""
        pos = self.slots["pos"]
        slots = self.slots | {"pos": torch.where(pos == NEVER, NEVER, pos - offset)}
        return replace(self, slots=slots, now=self.now - offset)

    def fork(self) -> ExpiringMemory:
        """An independent copy."""
        return self.map_tensors(torch.Tensor.clone)

    def select(self, rows: Tensor) -> ExpiringMemory:
        """Keep, repeat or reorder batch rows by index."""
        chosen = self.as_rectangle().map_tensors(lambda x: x.index_select(0, rows.to(x.device)))
        return replace(chosen, rows=(len(rows), *self.rows[1:]))

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> ExpiringMemory:
        """The store with `fn` applied to every tensor it holds; `fn` keeps shapes (or the caller mends `rows`)."""
        slots = {name: fn(x) for name, x in self.slots.items()}
        evicted, segments = None if self.evicted is None else fn(self.evicted), self.segments
        if segments is not None:
            segments = replace(segments, starts=fn(segments.starts), counts=fn(segments.counts))
        return replace(self, slots=slots, evicted=evicted, segments=segments, tail=[self.used])

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """Tensors (of a rectangle, the used part) and plain numbers; `from_state_dict` restores the same store."""
        numbers = dict(rows=list(self.rows), ramp=self.ramp, cap=self.cap, used=self.used, packed=self.packed)
        numbers.update(now=self.now, capacity=self.capacity, block=self.block, typical=self.typical)
        segments = None if self.segments is None else dict(vars(self.segments))
        slots = {name: (self[name] if segments is None else x).clone() for name, x in self.slots.items()}
        return {**numbers, "evicted": self.evicted, "segments": segments, "slots": slots}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ExpiringMemory:
        rows, used = tuple(state["rows"]), state["used"]
        segments = Segments(**state["segments"]) if state.get("segments") is not None else None
        expected = (*rows, used) if segments is None else (segments.capacity,)
        slots = {}
        for name, x in state["slots"].items():
            if tuple(x.shape[: len(expected)]) != expected:
                raise ValueError(f"{name} of a saved memory must begin with shape {expected}, got {tuple(x.shape)}")
            slots[name] = _with_room(x, state["capacity"] - used, len(rows)) if segments is None else x.clone()
        numbers = {key: state[key] for key in ("ramp", "cap", "used", "packed", "now", "evicted")}
        numbers |= {"block": state.get("block", 0), "typical": state.get("typical", state["packed"])}
        return cls(rows=rows, slots=slots, tail=[used], segments=segments, **numbers)

    # Inside

    def _check_append(self, new: dict[str, Tensor], count: int) -> None:
        if self.used and set(new) != set(self.slots):
            raise ValueError(f"this memory holds the fields {sorted(self.slots)}, got {sorted(new)}")
        for name, x in new.items():
            expected = (*self.rows, count)
            if tuple(x.shape[: len(expected)]) != expected:
                raise ValueError(f"{name} must begin with shape {expected}, got {tuple(x.shape)}")

    def _has_room(self, new: dict[str, Tensor], count: int) -> bool:
        return set(new) == set(self.slots) and self.tail[0] == self.used and self.used + count <= self.capacity

    def _write(self, new: dict[str, Tensor], used: int, count: int) -> None:
        """Put `count` memories of every row behind its `used` slots."""
        if self.segments is None:
            for name, x in new.items():
                self.slots[name].narrow(len(self.rows), used, count).copy_(x.detach())
            return
        ends = self.segments.ends(used)
        place = (ends.unsqueeze(1) + torch.arange(count, device=ends.device)).flatten()
        for name, x in new.items():
            slots = self.slots[name]
            slots.index_copy_(0, place, x.detach().to(slots.dtype).flatten(0, len(self.rows)))

    def _copy_with_room(self, new: dict[str, Tensor], count: int) -> ExpiringMemory:
        if self.segments is not None:
            return self._move_segments(self.segments, count)
        room = count + _spare_room(self.used + count, count)
        slots = {}
        for name, x in new.items():
            old = self[name] if self.used else x.new_empty(*self.rows, 0, *x.shape[len(self.rows) + 1 :])
            slots[name] = _with_room(old, room, len(self.rows))
        return replace(self, slots=slots, tail=[self.used])

    def _move_segments(self, old: Segments, count: int) -> ExpiringMemory:
        """Every row's segment copied to where it has room for `count` more."""
        added = self.used - old.base
        room = count + _spare_room(self.typical + self.used - self.packed + count, count)
        counts, total = old.counts + added, old.total + added * len(old.counts)
        segments = Segments.lay_out(counts, total, self.used, room)
        source, target = replace(segments, starts=old.starts).slots(), segments.slots()
        slots = {name: segments.fill(x.index_select(0, source), target, _empty(name)) for name, x in self.slots.items()}
        return replace(self, slots=slots, segments=segments, tail=[self.used])

    def _evict(self) -> ExpiringMemory:
        """Hold every row to `cap` living memories: the smallest remaining span goes first, the older of equals."""
        cap = self.cap
        assert cap is not None
        if self.used <= cap:
            return self
        self = self.as_rectangle()
        remaining = self.remaining(self.now)
        alive = remaining > 0
        ranked = remaining.argsort(dim=-1, stable=True)[..., : self.used - cap]
        gone = torch.zeros_like(alive).scatter_(-1, ranked, True)
        lost = (gone & alive).sum(-1)
        kept = torch.where(gone, NEVER, self.pos)
        slots = dict(self.slots)
        slots["pos"], slots["span"] = slots["pos"].clone(), slots["span"].clone()
        slots["pos"].narrow(-1, 0, self.used).copy_(kept)
        slots["span"].narrow(-1, 0, self.used).masked_fill_(gone, 0)
        evicted = lost if self.evicted is None else self.evicted + lost
        return replace(self, slots=slots, evicted=evicted)._dead_first()

    def _dead_first(self) -> ExpiringMemory:
        """Empty slots belong in front: bring them there, keeping the order of the rest."""
        order = (self.pos != NEVER).to(torch.uint8).argsort(dim=-1, stable=True)
        room = self.capacity - self.used
        slots = {name: _with_room(_take(self[name], order), room, len(self.rows)) for name in self.slots}
        return replace(self, slots=slots, tail=[self.used])


def _spare_room(used: int, block: int) -> int:
    """Free slots to keep beside `used` ones where `block` are appended at a time: none if a block would not fit in."""
    spare = max(used // 2, _SPARE)
    return spare if block <= spare else 0


def _empty(name: str) -> int:
    """What an empty slot of a field holds."""
    return NEVER if name == "pos" else 0


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Gather slots: x [*rows, n, ...], order [*rows, w] -> [*rows, w, ...]."""
    index = order.reshape(order.shape + (1,) * (x.dim() - order.dim()))
    return x.gather(order.dim() - 1, index.expand(*order.shape, *x.shape[order.dim() :]))


def _gather_slots(x: Tensor, order: Tensor, alive: Tensor, spare: int) -> Tensor:
    taken = _take(x, order)
    dead = ~alive.reshape(alive.shape + (1,) * (x.dim() - alive.dim()))
    return _with_room(taken.masked_fill_(dead, 0), spare, order.dim() - 1)


def _with_room(x: Tensor, room: int, dim: int) -> Tensor:
    """A copy of x with `room` more slots along `dim`, zero until written."""
    shape = list(x.shape)
    shape[dim] += room
    out = x.new_zeros(shape)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
