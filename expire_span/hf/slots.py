"""A retrofitted model's memories in slots of fixed size, so that one token of every row is one recorded CUDA graph on a GPU.

`SlotCache` is given to the model as `past_key_values`, with one new token of each row at a time. Its layers return keys and
values as they are; the attention function then stores them and reads the living memories (`LayerSlots.attend`). The host never
waits for the device, and all numbers that change from step to step lie on the device, so that the model's own forward pass can
be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expire_span.models.lifetimes import LifetimeRule
from expire_span.models.slot_step import Memories, SlotRules, SlotStep, StreamPosition
from expire_span.ops.slots import SpanForm, attend_slots, slot_kernel_serves
from expire_span.store import NEVER, ExpiringMemory
from expire_span.store.slots import FRESH, Slots

from .cache import ForgettingLayer
from .layouts import AttentionLayer
from .rotary import rotate_keys


class LayerSlots(SlotStep):
    """The slots of one attention layer; unlike in `SlotStep`, the model itself computes projections and rotary positions."""

    def __init__(
        self, layer: AttentionLayer, rules: SlotRules, clock: StreamPosition, frequencies: Tensor | None, like: Tensor
    ) -> None:
        self.rules, self.clock, self.like = rules, clock, like
        self.frequencies = None if frequencies is None else frequencies.to(like.device)
        self.kv_heads, self.head_dim = layer.kv_heads, layer.head_dim
        self.form = SpanForm(*(x.to(like.device).contiguous() for x in rules.form))
        self.edge = self.form.low + rules.ramp
        self.fused = slot_kernel_serves(rules.impl, like)
        self.most = [0] * layer.kv_heads
        self.slots: Slots

    def allocate(self, rows: int, capacity: list[int] | None = None) -> None:
        capacity = capacity or self.capacity_for([0] * self.kv_heads)
        like, r = self.like, self.rules
        self.slots = Slots(rows, self.head_dim, capacity, ramp=r.ramp, cap=r.cap, dtype=like.dtype, device=like.device)
        self._adopt()

    def memories(self, state: Any) -> Memories:
        """The memories in a layer of an `ExpiringCache`, for `load`."""
        memory, now = state.memory, state.seen
        assert isinstance(memory, ExpiringMemory)
        return Memories(memory["k"], memory["v"], memory.span, memory.pos, now)

    def load(self, rows: Tensor, found: Memories, counts: list[int]) -> None:
        keys, offset = found.k, self.clock.now - found.now
        if offset and keys.shape[2]:
            assert self.frequencies is not None, "rows of unequal age need rotary positions"
            keys = rotate_keys(keys, offset, self.frequencies)
        self.fill(rows, found._replace(k=keys), counts)

    def to_memory(self) -> ExpiringMemory:
        """The living memories in order of birth, as an `ExpiringMemory`; rows with fewer of them have empty slots in front."""
        s, column, now = self.slots, self.clock.column, self.clock.now
        alive = s.left(column) > 0  # [B, Hkv, W]
        born = s.by_head(s.pos)
        order = torch.where(alive, born, -torch.inf).argsort(-1)[..., alive.shape[-1] - int(alive.sum(-1).max()) :]
        alive = alive.gather(-1, order)
        pos = torch.where(alive, born.gather(-1, order).long() + (now - column), NEVER)
        span = torch.where(alive, s.by_head(s.edge).gather(-1, order) - s.ramp, 0.0)
        wide = order.unsqueeze(-1).expand(*order.shape, s.head_dim)
        fields = {name: s.by_head(x).gather(2, wide) for name, x in (("k", s.k), ("v", s.v))}
        fields = {name: x.masked_fill(~alive.unsqueeze(-1), 0) for name, x in fields.items()}
        memory = ExpiringMemory.empty(tuple(alive.shape[:2]), ramp=s.ramp, cap=s.cap, device=s.k.device)
        return memory.append(pos, span, check_values=False, **fields).expire(now)

    def rebase(self, offset: int) -> None:
        """Rotate all keys back by `offset` positions. The slots' own positions count from the last compaction and stay."""
        assert self.frequencies is not None
        frequencies = self.frequencies
        self.slots.map_keys(lambda keys: rotate_keys(keys, -offset, frequencies))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float | None) -> Tensor:
        """Store one memory of each row and head, and read: q [B, Hq, 1, D], k, v [B, Hkv, 1, D] -> [B, 1, Hq, D]."""
        chosen: float = query.shape[-1] ** -0.5 if scale is None else scale
        step = self._attend_fused if self.fused else self._attend_plainly
        y = step(query, key, value, hidden.squeeze(1), chosen)
        if self.rules.cap is not None:
            self.slots.evict(self.clock.on_device + 1 if self.fused else self.clock.column + 1)
        return y.view(len(query), 1, query.shape[1], -1)

    def _attend_fused(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
        from expire_span.ops.triton.slots import Fields, triton_step

        group = query.shape[1] // self.kv_heads
        return triton_step(
            torch.cat([x.flatten(1).to(query.dtype) for x in (query, key, value)], 1),
            hidden.contiguous(),
            self.form,
            Fields(*self.fields),
            self.clock.on_device,
            self.division(group),
            group=group,
            fresh=FRESH,
            ramp=self.rules.ramp,
            scale=scale,
            include_self=True,
            qk_norm=False,
        )

    def _attend_plainly(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
        column = self.clock.column
        logits = torch.nn.functional.linear(hidden.float(), self.form.weight) + self.form.bias
        edge = torch.addcmul(self.edge, torch.sigmoid(logits), self.form.room)
        for buffer, x in ((self.k, key.squeeze(2)), (self.v, value.squeeze(2)), (self.edges, edge)):
            buffer.select(2, column).copy_(x)
        keys, values, edges, births = self.reading
        left = (births - column).add_(edges)
        return attend_slots(query.squeeze(2), keys, values, left, ramp=self.rules.ramp, scale=scale)


class SlotLayer(ForgettingLayer):
    """The cache layer that transformers sees."""

    has_buffers = True  # slots are there from the beginning

    def __init__(self, slots: LayerSlots) -> None:
        super().__init__()
        self.slots = slots

    @property
    def seen(self) -> int:
        return self.slots.clock.now

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the slots exist from the beginning."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != 1:
            raise ValueError(f"slots take one token of each row at a time, got {key_states.shape[2]}")
        return key_states, value_states


class SlotCache(Cache):
    """Memories of all layers in slots; an engine of hf/decoding.py makes and fills it."""

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[LayerSlots]) -> None:
        super().__init__(layers=[SlotLayer(x) for x in layers])  # type: ignore[arg-type]


def span_form(predictor: Any, layer: AttentionLayer, dial: float) -> SpanForm | None:
    """The `SpanForm` of a layer: how its spans, times `dial`, follow from hidden states."""
    if layer.window is not None:
        return SpanForm.constant(torch.full((layer.kv_heads,), layer.window - 1.0), layer.dim)
    assert isinstance(predictor, LifetimeRule)
    form = predictor.span_form(layer.dim)
    return form if form is None else form._replace(low=form.low * dial, room=form.room * dial)
