"""ExpiringMemory: keys and values (or any named fields) that are deleted for good when their span is over.

A store holds, for each of its rows, memories sorted by birth: a position, a span, and the fields. Rows are independent: each
keeps its own memories. Appending takes time in proportion to what is appended. Compaction removes expired memories by copying
the living ones, and runs once about half as many memories were appended as it had kept. So its cost per memory is constant on
average, and the bytes held stay within a constant factor of the living memories' bytes. ops/rule.py decides which memories are
dead, layouts.py how the others are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.inputs import check_ramp, check_spans
from expire_span.ops.rule import NEVER, steps_left

from .interface import Store
from .layouts import LEAST_SPARE, Layout, Rectangle, SegmentLayout, widen
from .order import blank, find_living
from .segments import Segments

NO_ROOM = 2**62
"""A number of memories for which no compaction keeps spare slots."""


@dataclass(frozen=True, eq=False)
class ExpiringMemory(Store):
    """Memories of `rows` = (B,) or (B, Hkv) independent rows. Build one with `ExpiringMemory.empty`."""

    layout_name = "expiring"

    ramp: float
    cap: int | None
    layout: Layout
    block: int = 0
    """Number of memories that the last append added to each row."""
    now: int = NEVER
    """Position of the next query, from the last call of `expire`: memories that are dead for it may already be deleted."""
    evicted: Tensor | None = None
    """Number of living memories that the cap removed, per row: each is a departure from exactness."""

    @classmethod
    def empty(
        cls, rows: int | tuple[int, ...], *, ramp: float, cap: int | None = None, device: torch.device | str = "cpu"
    ) -> ExpiringMemory:
        """A store that holds nothing. rows: B, (B,) or (B, Hkv); cap: the most living memories of a row."""
        check_ramp(ramp)
        if cap is not None and (not isinstance(cap, int) or cap < 1):
            raise ValueError(f"cap must be a whole number of at least 1, got {cap!r}")
        sizes = (rows,) if isinstance(rows, int) else rows
        if not isinstance(sizes, (tuple, list)) or not all(isinstance(n, int) and n >= 0 for n in sizes):
            raise ValueError(f"rows must be B, (B,) or (B, Hkv) in whole numbers, got {rows!r}")
        rows = tuple(sizes)
        pos = torch.empty(*rows, 0, dtype=torch.int64, device=device)
        span = torch.empty(*rows, 0, device=device)
        evicted = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(ramp, cap, Rectangle(rows, {"pos": pos, "span": span}), evicted=evicted)

    # Reading

    def __len__(self) -> int:
        """Number of slots in use in the widest row, empty ones in front included."""
        return self.layout.used

    @property
    def rows(self) -> tuple[int, ...]:
        return self.layout.rows

    @property
    def used(self) -> int:
        return self.layout.used

    @property
    def capacity(self) -> int:
        """Number of slots that the widest row may use before the buffers must grow."""
        return self.layout.capacity

    @property
    def slots(self) -> dict[str, Tensor]:
        """The buffers as they are stored: [*rows, capacity, ..] in a rectangle, [slots, ..] in segments."""
        return self.layout.buffers

    @property
    def segments(self) -> Segments | None:
        """Where rows of unequal length lie, or None in a rectangle."""
        return self.layout.segments if isinstance(self.layout, SegmentLayout) else None

    @property
    def pos(self) -> Tensor:
        return self["pos"]

    @property
    def span(self) -> Tensor:
        return self["span"]

    def __getitem__(self, name: str) -> Tensor:
        """One field of the slots in use, [*rows, used, ..]: a view of a rectangle, or gathered from segments."""
        return self.layout.read(name)

    def row_places(self) -> tuple[Tensor, Tensor, int, int]:
        """Where the rows of segments lie, for the decode kernel: (starts, counts, added, used).

        starts and counts [rows] are each row's first slot and its number of slots when the segments were laid out; `added` is
        the number of slots appended to every row since then; `used` is the number of slots of the widest row now.
        """
        assert self.segments is not None
        return self.segments.starts, self.segments.counts, self.used - self.segments.base, self.used

    @property
    def fields(self) -> dict[str, Tensor]:
        return {name: self[name] for name in self.slots if name not in ("pos", "span")}

    @property
    def bytes_held(self) -> int:
        return sum(x.numel() * x.element_size() for x in (*self.slots.values(), *self.layout.index_tensors()))

    def remaining(self, now: int) -> Tensor:
        """Steps until each memory is dead, counted from a query at `now`; dead where <= 0. [*rows, used]."""
        return steps_left(self.span, self.pos, now, self.ramp)

    def live(self, now: int | None = None) -> Tensor:
        """How many memories of each row are alive for a query at `now`, [*rows]; None takes the position of the last
        `expire`."""
        return (self.remaining(self.now if now is None else now) > 0).sum(-1)

    # Changing

    def append(self, pos: Tensor, span: Tensor, *, check_values: bool = True, **fields: Tensor) -> ExpiringMemory:
        """Add memories born after all stored ones. pos [n] or [*rows, n], span [*rows, n], fields [*rows, n, ...].

        A span is -ramp or more, as for the operator: at -ramp a memory is dead at birth. Spans are stored in float32, as the
        operator compares them; float64 spans stay float64 where all fields of floating-point numbers are float64 too.
        check_values: refuse decreasing positions, NaN spans and spans below -ramp, and fields of another dtype than is stored.
        On a GPU the host must wait for the device to read the values; switch the check off where they are known to be valid.
        Without it, fields are converted to the stored dtype, as for a layer that is called with and without autocast.
        """
        for name, x in {"pos": pos, "span": span, **fields}.items():
            if not isinstance(x, Tensor):
                raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if pos.is_floating_point() or pos.is_complex() or pos.dtype == torch.bool:
            raise ValueError(f"positions must be integers, got {pos.dtype}")
        if not span.is_floating_point() or span.dim() != len(self.rows) + 1:
            wanted = f"a float tensor of shape {(*self.rows, 'n')}".replace("'", "")
            raise ValueError(f"span must be {wanted}, got {span.dtype} of shape {tuple(span.shape)}")
        count = span.shape[-1]
        if tuple(pos.shape) not in ((count,), (*self.rows, count)):
            raise ValueError(f"pos must have shape {(count,)} or {(*self.rows, count)}, got {tuple(pos.shape)}")
        if check_values:
            check_spans(span, self.ramp)
        new = {"pos": pos.to(torch.int64).expand(*self.rows, count), "span": self._comparable(span, fields), **fields}
        self._check_shapes(new, count)
        if check_values:
            self._check_dtypes(new)
            self._check_rising(new["pos"])
        return replace(self, layout=self.layout.append(new, count), block=count)

    def expire(self, now: int) -> ExpiringMemory:
        """Delete what is dead for every query from position `now` on, and what the cap does not allow."""
        if not isinstance(now, int):
            raise ValueError(f"now must be a whole number, the position of the next query, got {now!r}; give int(now)")
        store = replace(self, now=now)._evict() if self.cap is not None else replace(self, now=now)
        added = store.used - store.layout.packed
        return store.compact() if added >= max(store.layout.typical // 2, LEAST_SPARE) else store

    def compact(self) -> ExpiringMemory:
        """Remove dead memories now. The host waits for the device, since the number of living memories decides the new size."""
        return replace(self, layout=self.layout.compact(self.remaining(self.now) > 0, self.block))

    def trimmed(self) -> ExpiringMemory:
        """A copy of what is alive, without spare slots: the next append copies it."""
        return replace(self, layout=self.layout.compact(self.remaining(self.now) > 0, NO_ROOM))

    def as_rectangle(self) -> ExpiringMemory:
        """The same store in the rectangle layout, for operations on whole rows."""
        return replace(self, layout=self.layout.as_rectangle())

    def shared_by_heads(self) -> ExpiringMemory:
        """A store with rows (B,) in place of (B, Hkv), whose heads all hold memories of the same births and spans; fields
        [B, Hkv, S, ..] become [B, S, Hkv, ..]."""
        fields = {name: x.transpose(1, 2) for name, x in self.fields.items()}
        empty = ExpiringMemory.empty(self.rows[0], ramp=self.ramp, cap=self.cap, device=self.pos.device)
        joined = empty.append(self.pos[:, 0], self.span[:, 0], check_values=False, **fields) if len(self) else empty
        return joined.expire(self.now)

    def with_span(self, span: Tensor) -> ExpiringMemory:
        """The same memories with newly predicted spans [*rows, used]; empty slots stay empty."""
        if tuple(span.shape) != (*self.rows, self.used):  # a width of 1 would be broadcast
            raise ValueError(f"span must have shape {(*self.rows, self.used)}, got {tuple(span.shape)}")
        layout = self.layout.as_rectangle()
        fresh = torch.where(layout.read("pos") == NEVER, 0, span.detach()).to(layout.buffers["span"].dtype)
        room = layout.buffers["span"].new_zeros(*self.rows, layout.capacity - layout.used)
        buffers = layout.buffers | {"span": torch.cat([fresh, room], -1)}
        return replace(self, layout=layout.with_buffers(buffers))

    def forget_rows(self, rows: Tensor) -> ExpiringMemory:
        """Empty the batch rows marked in `rows` [B] (bool)."""
        layout, gone = self.layout.as_rectangle(), torch.as_tensor(rows)
        if gone.dtype != torch.bool or tuple(gone.shape) != self.rows[:1]:
            wanted, got = f"one mark for each of the {self.rows[0]} rows", f"{gone.dtype} of shape {tuple(gone.shape)}"
            raise ValueError(f"the rows to forget must be a tensor of bool, {wanted}, got {got}")
        gone = gone.to(layout.buffers["pos"].device)
        buffers = {}
        for name, x in layout.buffers.items():
            buffers[name] = x.masked_fill(gone.reshape(-1, *(1,) * (x.dim() - 1)), blank(name))
        return replace(self, layout=layout.with_buffers(buffers))

    def join(self, later: ExpiringMemory) -> ExpiringMemory:
        """Add all memories of another store with the same rows, born after this one's in every row."""
        joined = self.as_rectangle().append(later.pos, later.span, check_values=False, **later.fields)
        return replace(joined, layout=joined.layout.as_rectangle().order_living_last())

    def replace_field(self, name: str, x: Tensor) -> ExpiringMemory:
        """The store with a copy of x as its buffer for one field, of the same shape as `slots[name]`."""
        held = {key: tuple(buffer.shape) for key, buffer in self.slots.items()}
        if held.get(name) != tuple(x.shape):
            raise ValueError(f"{name} must be one of the fields {held}, with its shape, got {tuple(x.shape)}")
        return replace(self, layout=self.layout.with_buffers(self.slots | {name: x.clone()}))

    def fork(self) -> ExpiringMemory:
        """An independent copy."""
        return self.map_tensors(torch.Tensor.clone)

    def select(self, rows: Tensor) -> ExpiringMemory:
        """The batch rows with these indices, kept, repeated or reordered."""
        rows = torch.as_tensor(rows)
        if rows.device.type == "cpu" and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.rows[0]:
            raise ValueError(
                f"the rows to select must lie in 0..{self.rows[0] - 1}, got {int(rows.min())} to {int(rows.max())}"
            )
        layout = self.layout.as_rectangle().map_tensors(lambda x: x.index_select(0, rows.to(x.device)))
        evicted = None if self.evicted is None else self.evicted.index_select(0, rows.to(self.evicted.device))
        return replace(self, layout=replace(layout, rows=(len(rows), *self.rows[1:])), evicted=evicted)

    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> ExpiringMemory:
        evicted = None if self.evicted is None else fn(self.evicted)
        return replace(self, layout=self.layout.map_tensors(fn), evicted=evicted)

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """The store as tensors (of a rectangle, only the slots in use) and plain values; `from_state_dict` restores it."""
        numbers = dict(rows=list(self.rows), ramp=self.ramp, cap=self.cap, used=self.used, packed=self.layout.packed)
        numbers.update(now=self.now, capacity=self.capacity, block=self.block, typical=self.layout.typical)
        segments = None if self.segments is None else dict(vars(self.segments))
        slots = {name: (self[name] if segments is None else x).clone() for name, x in self.slots.items()}
        return {**numbers, "evicted": self.evicted, "segments": segments, "slots": slots}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ExpiringMemory:
        needed = {"rows", "used", "packed", "capacity", "slots", "ramp", "cap", "now", "evicted", "block", "typical"}
        if missing := (needed | {"segments"}) - set(state):
            raise ValueError(f"a saved memory must hold what state_dict gives, got one without {sorted(missing)}")
        rows, used = tuple(state["rows"]), state["used"]
        segments = Segments(**state["segments"]) if state["segments"] is not None else None
        expected = (*rows, used) if segments is None else (segments.capacity,)
        buffers = {}
        for name, x in state["slots"].items():
            if tuple(x.shape[: len(expected)]) != expected:
                raise ValueError(f"{name} of a saved memory must begin with shape {expected}, got {tuple(x.shape)}")
            buffers[name] = widen(x, state["capacity"] - used, len(rows)) if segments is None else x.clone()
        layout: Layout = Rectangle(rows, buffers, used, state["packed"], [used])
        if segments is not None:
            mean = state["typical"]
            layout = SegmentLayout(rows, buffers, used, state["packed"], [used], segments=segments, mean_packed=mean)
        return cls(layout=layout, **{key: state[key] for key in ("ramp", "cap", "now", "evicted", "block")})

    # Inside

    def _comparable(self, span: Tensor, fields: dict[str, Tensor]) -> Tensor:
        """Spans in the dtype in which the operator compares them with ages, so that both call the same memories dead."""
        narrow = any(x.is_floating_point() and x.dtype != torch.float64 for x in fields.values())
        if span.dtype == torch.float32 or (span.dtype == torch.float64 and not narrow):
            return span
        return span.float().clamp_min(-self.ramp)  # rounding may put a span below -ramp

    def _check_shapes(self, new: dict[str, Tensor], count: int) -> None:
        if self.used and set(new) != set(self.slots):
            raise ValueError(f"this memory holds the fields {sorted(self.slots)}, got {sorted(new)}")
        for name, x in new.items():
            expected = (*self.rows, count)
            if tuple(x.shape[: len(expected)]) != expected:
                raise ValueError(f"{name} must begin with shape {expected}, got {tuple(x.shape)}")
            if (
                self.used
                and self.segments is None
                and x.shape[len(expected) :] != self.slots[name].shape[len(expected) :]
            ):
                held = (*expected, *self.slots[name].shape[len(expected) :])  # a width of 1 would be broadcast
                raise ValueError(f"{name} must have shape {held}, as what is stored, got {tuple(x.shape)}")

    def _check_dtypes(self, new: dict[str, Tensor]) -> None:
        for name, x in new.items():
            held = self.slots[name].dtype if self.used else x.dtype
            if x.dtype != held:
                raise ValueError(f"{name} must be {held}, as what is stored, got {x.dtype}; give it as .to({held})")

    def _check_rising(self, pos: Tensor) -> None:
        last = (
            self.slots["pos"][..., self.used - 1 : self.used] if self.used and self.segments is None else pos[..., :0]
        )
        steps = torch.cat([last, pos], -1).diff(dim=-1)
        if bool((steps < 0).any()):
            raise ValueError(
                f"positions must not decrease from one memory to the next, got a step of {int(steps.min())}; "
                "append memories in order of birth"
            )

    def _evict(self) -> ExpiringMemory:
        """Evict living memories of every row down to `cap`."""
        if self.cap is None or self.used <= self.cap:
            return self
        layout = self.layout.as_rectangle()
        left = steps_left(layout.read("span"), layout.read("pos"), self.now, self.ramp)
        alive, lost = find_living(left, self.cap)
        assert lost is not None
        buffers = dict(layout.buffers)
        for name in ("pos", "span"):
            buffers[name] = buffers[name].clone()
            buffers[name].narrow(-1, 0, layout.used).masked_fill_(~alive, blank(name))
        evicted = lost if self.evicted is None else self.evicted + lost
        return replace(self, layout=replace(layout, buffers=buffers).order_living_last(), evicted=evicted)
