"""A retrofitted model's memories in slots of fixed size, so that one token of every row is one recorded CUDA graph on a GPU.

`SlotCache` is given to the model as `past_key_values`, with one new token of each row at a time. Its layers return keys and
values as they are; the attention function then stores them and reads the living memories (`SlotAttention`). The host never
waits for the device, and all numbers that change from step to step lie on the device, so that the model's own forward pass can
be recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from expire_span.models.lifetimes import LifetimeRule
from expire_span.models.slot_step import SlotRules, StreamPosition
from expire_span.ops.slots import SpanForm, attend_slots, slot_kernel_serves
from expire_span.store.slot_memory import Memories, SlotMemory
from expire_span.store.slots import FRESH

from .attention import KEPT
from .cache import ForgettingLayer
from .layouts import AttentionLayer


class SlotAttention:
    """One attention layer over its slots; the model itself computes projections and rotary positions."""

    first: Tensor | None = None
    """Which rows, [rows, 1], read one of the first tokens in this step, which are kept for ever; None if no row does."""

    def __init__(self, layer: AttentionLayer, rules: SlotRules, clock: StreamPosition, like: Tensor) -> None:
        self.rules, self.clock, self.softcap = rules, clock, layer.softcap
        self.form = SpanForm(*(x.to(like.device).contiguous() for x in rules.form))
        self.memory = SlotMemory(
            layer.kv_heads,
            layer.head_dim,
            ramp=rules.ramp,
            cap=rules.cap,
            limit=rules.limit,
            fused=slot_kernel_serves(rules.impl, like),
            like=like,
        )

    def memories(self, state: Any) -> Memories:
        """The memories in a layer's state, for `load`."""
        memory = state["memory"]
        return Memories(memory["k"], memory["v"], memory.span, memory.pos, state["position"])

    def load(self, rows: Tensor, found: Memories, counts: list[int]) -> None:
        """Put memories into rows. Their keys stay as they are: the model gets the positions of each row, not of this clock."""
        self.memory.load(rows, self.clock.column, found, counts)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        scale: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Store one memory of each row and head, and read: q [B, Hq, 1, D], k, v [B, Hkv, 1, D] -> [B, 1, Hq, D]."""
        chosen: float = query.shape[-1] ** -0.5 if scale is None else scale
        fused, slots = self.memory.fused, self.memory.slots
        if fused:
            y = self._attend_fused(query, key, value, hidden.squeeze(1), chosen, sinks)
        else:
            y = self._attend_plainly(query, key, value, hidden.squeeze(1), chosen, sinks)
        if self.first is not None:
            self._keep_first(self.first)
        if self.rules.cap is not None:
            slots.evict(self.clock.on_device + 1 if fused else self.clock.column + 1)
        return y.view(len(query), 1, query.shape[1], -1)

    def _keep_first(self, rows: Tensor) -> None:
        """Give the memories that these rows have just stored the span KEPT."""
        slots = self.memory.slots
        place = (slots.bounds[:-1] + self.clock.on_device).long()
        slots.span.index_copy_(1, place, slots.span.index_select(1, place).masked_fill(rows, KEPT))

    def _attend_fused(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        from expire_span.ops.triton.slots import Fields, triton_step

        group = query.shape[1] // self.memory.heads
        return triton_step(
            torch.cat([x.flatten(1).to(query.dtype) for x in (query, key, value)], 1),
            hidden.contiguous(),
            self.form,
            Fields(*self.memory.fields),
            self.clock.on_device,
            self.memory.division(group),
            group=group,
            fresh=FRESH,
            ramp=self.rules.ramp,
            scale=scale,
            include_self=True,
            qk_norm=False,
            softcap=self.softcap,
            sinks=sinks,
        )

    def _attend_plainly(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float, sinks: Tensor | None
    ) -> Tensor:
        column = self.clock.column
        logits = torch.nn.functional.linear(hidden.float(), self.form.weight) + self.form.bias
        span = torch.addcmul(self.form.low, torch.sigmoid(logits), self.form.room)
        self.memory.store(key.squeeze(2), value.squeeze(2), span, column)
        keys, values, spans, births = self.memory.reading
        remaining = (births - column).add_(spans)
        capped: dict[str, Any] = dict(softcap=self.softcap, sinks=sinks)
        return attend_slots(query.squeeze(2), keys, values, remaining, ramp=self.rules.ramp, scale=scale, **capped)


class SlotLayer(ForgettingLayer):
    """The cache layer that transformers sees."""

    has_buffers = True  # slots are there from the beginning

    def __init__(self, attention: SlotAttention) -> None:
        super().__init__()
        self.attention = attention

    @property
    def seen(self) -> int:
        return self.attention.clock.now

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: the slots exist from the beginning."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if key_states.shape[2] != 1:
            raise ValueError(f"slots take one token of each row at a time, got {key_states.shape[2]}")
        return key_states, value_states


class SlotCache(Cache):
    """Memories of all layers in slots; the stepper of hf/decoding.py makes and fills it."""

    layers: list[SlotLayer]  # type: ignore[assignment]

    def __init__(self, layers: list[SlotAttention]) -> None:
        super().__init__(layers=[SlotLayer(x) for x in layers])  # type: ignore[arg-type]


def span_form(predictor: Any, layer: AttentionLayer, dial: float) -> SpanForm | None:
    """The `SpanForm` of a layer: how its spans, times `dial`, follow from hidden states."""
    if layer.window is not None:
        return SpanForm.constant(torch.full((layer.kv_heads,), layer.window - 1.0), layer.dim)
    assert isinstance(predictor, LifetimeRule)
    form = predictor.span_form(layer.dim)
    return form if form is None else form._replace(low=form.low * dial, room=form.room * dial)
