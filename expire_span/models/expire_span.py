"""The Expire-Span mixer: attention over memories whose lifetimes are predicted when they are written.

    e_i = L sigmoid(w . h_i / tau + b),  m_ti = clamp(1 + (e_i - (t - i)) / R, 0, 1)

In training the state holds hidden states, detached (carried.py), and keys, values and spans are recomputed from them in
every block, so that all weights learn from old memories. In inference it holds keys and values in an `ExpiringMemory`.
Both delete for good.

Differences from the paper: spans per key/value head, a reach that heads learn, a hard cap and the L1 form of the loss are
options; dropout acts on the mixer's output instead of the attention weights; with pre-norm, memories are stored after the norm.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from expire_span.config import DecoderConfig, ExpireSpanConfig
from expire_span.memory import ExpiringMemory
from expire_span.ops import (
    attend_in_segments,
    can_attend_in_segments,
    expire_attention,
    resolve_impl,
    spans_of_heads,
)
from expire_span.ops.live import live_queries, ramp_loss

from . import carried
from .attention import AttentionMixer
from .digits import storage_dtype
from .mixer import MixerAux, MixerOutput
from .rotary import rotate
from .span_predictor import ReachPredictor, SpanPredictor

Cache = Literal["hidden", "kv", "none"]
"""What a state stores: hidden states (training), keys and values (inference), or nothing beyond the block itself."""
Remembered = tuple[Tensor, Tensor, Tensor, Tensor, Any]
"""Keys, values, spans and positions that the block attends to, and what is stored with the block in it."""
REBASE_AFTER = 2**30
"""Positions are counted anew once they reach this, so that an endless stream never leaves 32-bit integers."""


class ExpireSpan(AttentionMixer):
    """`mixer(x, state)`, with state {"memory": ExpiringMemory, "position": int, "cache": "kv"}, or in training what
    carried.py says, with cache "hidden".

    Systems whose memories live for a span that something else decides are subclasses: they say by `rules` how such
    lifetimes are expressed, and give their own `build_predictor`.
    """

    steady_shapes = True

    def __init__(self, config: DecoderConfig, layer: int = 0, relative_keys: nn.Parameter | None = None) -> None:
        super().__init__(config, layer, relative_keys)
        self.mixer = self.rules()
        heads, learned = config.num_kv_heads, self.mixer.reach == "learned"
        self.own_heads = heads if self.mixer.own_heads is None else min(self.mixer.own_heads, heads)
        shared = 1 if self.mixer.span_per == "layer" else min(self.own_heads + 1, heads)
        self.span_outputs = heads if learned else shared
        self.span_predictor = self.build_predictor()

    def rules(self) -> ExpireSpanConfig:
        assert isinstance(self.config.mixer, ExpireSpanConfig)
        return self.config.mixer

    def build_predictor(self) -> nn.Module:
        """A module that gives hidden states [B, S, C] spans [B, outputs, S]; heads beyond the outputs share the last."""
        if self.mixer.reach == "learned":
            return ReachPredictor(self.config.dim, self.span_outputs, self.own_heads, self.mixer)
        return SpanPredictor(self.config.dim, self.span_outputs, self.mixer)

    def can_record(self, carried: bool) -> bool:
        device, head_dim = self.query.weight.device, self.config.head_dim
        return resolve_impl(self.mixer.impl, device, head_dim=head_dim) == "triton"

    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Cache | None = None) -> dict[str, Any]:
        """An empty memory (or `initial_memories` zero vectors); by default hidden states in training, else keys and values."""
        if cache is None or (cache == "none" and self.mixer.initial_memories):  # zero vectors must be stored to be seen
            cache = "hidden" if self.training else "kv"
        count, device = self.mixer.initial_memories, self.query.weight.device
        zeros = empty if empty is not None else self.query.weight.new_zeros(self.config.dim)
        h = zeros.detach().expand(batch, count, -1)
        if cache == "hidden":
            state = carried.empty(batch, self.config.dim, dtype=storage_dtype(h), device=device)
            pos = torch.arange(-count, 0, device=device).expand(batch, -1)
            return {**state, "hidden": h.to(state["hidden"].dtype), "pos": pos, "position": 0, "cache": cache}
        rows = (batch, self.config.num_kv_heads) if self._rows_per_head(cache) else (batch,)
        memory = ExpiringMemory.empty(rows, ramp=self.mixer.ramp, cap=self.mixer.cap, device=device)
        if count and cache != "none":
            with torch.no_grad():
                memory = self._store(memory, h, torch.arange(count, device=device))
        return {"memory": memory, "position": count, "cache": cache}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, empty: Tensor | None = None) -> dict[str, Any]:
        """The rows marked in `fresh` [B] begin again; positions go on."""
        if state["cache"] == "hidden":
            start = self.initial_state(state["pos"].shape[0], empty, "hidden")
            return carried.forget_rows(state, fresh, start)
        memory: ExpiringMemory = state["memory"].forget_rows(fresh)
        if self.mixer.initial_memories:
            start = self.initial_state(memory.rows[0], empty, state["cache"])["memory"].forget_rows(~fresh)
            memory = memory.join(start.rebase(start.used - state["position"]))
        return {**state, "memory": memory}

    def forward(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        (state,) = carried.settle([state])
        if state["position"] >= REBASE_AFTER:
            state = self.rebase(state, state["position"])
        start, count = state["position"], x.shape[1]
        pos = torch.arange(start, start + count, device=x.device)
        if self._reads_in_place(x, state):
            return self._decode(x, pos, state)
        keys, values, span, k_pos, stored = self._remember(x, pos, state)
        y = self._attend(x, keys, values, self._noisy(span), pos, k_pos)
        aux = self._report(span, k_pos, start, count)
        if state["cache"] == "hidden":
            left = span.detach().amax(1) + self.mixer.ramp - (count - k_pos)
            state = carried.delete_dead(stored, k_pos, left, state, block=count, cap=self.mixer.cap)
            aux.bytes_held = carried.bytes_held(state)
            return MixerOutput(y, state, aux)
        memory = stored.expire(start + count)
        aux.bytes_held = memory.bytes_held
        return MixerOutput(y, {"memory": memory, "position": start + count, "cache": state["cache"]}, aux)

    def _reads_in_place(self, x: Tensor, state: dict[str, Any]) -> bool:
        """Whether a few tokens meet a store whose rows differ in length, on a device that reads such rows where they lie."""
        if state["cache"] != "kv" or state["memory"].segments is None:
            return False
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return can_attend_in_segments(self.mixer.impl, x.device, x.shape[1], self.config.head_dim, dtype)

    def _decode(self, x: Tensor, pos: Tensor, state: dict[str, Any]) -> MixerOutput:
        """The same as `forward`, without a rectangle of all rows."""
        m, start, count = self.mixer, state["position"], x.shape[1]
        q, new = self._place(self._split(self.query(x)), pos), self._predict_by_head(x)
        memory = self._append_kv(state["memory"], pos, new, self._keys(x, pos), self._split(self.value(x)))
        k, v, span, k_pos = (memory.slots[name] for name in ("k", "v", "span", "pos"))
        rules: dict[str, Any] = dict(ramp=m.ramp, include_self=m.include_self)
        rules |= dict(relative_keys=self._shared[0], normalizer_eps=m.normalizer_eps)
        y = attend_in_segments(q, k, v, span, pos, k_pos, memory.row_places(), **rules)
        kept = memory.expire(start + count)
        aux = MixerAux(
            lambda: self._span_loss(*_with_heads(memory), start, count),
            new.squeeze(1),
            lambda: self._live(*_with_heads(memory), start, count),
            kept.bytes_held,
        )
        return MixerOutput(self._finish(y), {**state, "memory": kept, "position": start + count}, aux)

    def rebase(self, state: dict[str, Any], offset: int) -> dict[str, Any]:
        """Count positions from `offset` on; stored rotated keys are turned back by as much."""
        if state["cache"] == "hidden":
            return state  # its positions always count from the block to come
        memory = state["memory"].rebase(offset)
        if state["cache"] == "kv" and self.config.positions == "rotary" and len(memory):
            turn = self._angles(torch.tensor(-offset, device=memory.pos.device), memory.slots["k"].dtype)
            memory.slots["k"] = rotate(memory.slots["k"], turn)
        return {**state, "memory": memory, "position": state["position"] - offset}

    # The two caches

    def _rows_per_head(self, cache: Cache) -> bool:
        """A key/value store with a span per head deletes per head; a hidden state lives while any head needs it."""
        return cache == "kv" and self.mixer.span_per == "kv_head"

    def _remember(self, x: Tensor, pos: Tensor, state: dict[str, Any]) -> Remembered:
        if state["cache"] == "hidden":
            return self._remember_hidden(x, pos, state)
        if state["cache"] == "kv":
            return self._remember_kv(x, pos, state["memory"])
        return self._keys(x, pos), *self._values_and_spans(x), pos, state["memory"]

    def _remember_hidden(self, x: Tensor, pos: Tensor, state: dict[str, Any]) -> Remembered:
        """Keys, values and spans of stored and new hidden states, all from today's weights."""
        dtype = storage_dtype(x)
        h = torch.cat([state["hidden"].to(dtype), x.to(dtype)], 1)  # [B, S, C]
        k_pos = torch.cat([state["pos"], pos.expand(x.shape[0], -1)], 1)
        return self._keys(h, k_pos), *self._values_and_spans(h), k_pos, h

    def _values_and_spans(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Values [B, Hkv, S, D] and spans [B, P, S]."""
        if isinstance(self.span_predictor, SpanPredictor):
            values, span = self.span_predictor.with_values(h, self.value)
        else:
            values, span = self.value(h), self.span_predictor(h)
        return self._split(values), span

    def _remember_kv(self, x: Tensor, pos: Tensor, memory: ExpiringMemory) -> Remembered:
        """Keys and values are computed once; with gradients on, the new ones stay attached."""
        span = self._predict_by_head(x)
        keys, values = self._keys(x, pos), self._split(self.value(x))
        old = memory
        memory = self._append_kv(memory, pos, span, keys, values)
        if torch.is_grad_enabled() and keys.requires_grad:
            stored = self._read_kv(old)
            keys, values, span = (torch.cat([s.to(n.dtype), n], 2) for s, n in zip(stored[:3], (keys, values, span)))
            k_pos = torch.cat([stored[3], pos.expand(*stored[3].shape[:-1], -1)], -1)
            return keys, values, span, k_pos, memory
        return *self._read_kv(memory), memory

    def _append_kv(
        self, memory: ExpiringMemory, pos: Tensor, span: Tensor, keys: Tensor, values: Tensor
    ) -> ExpiringMemory:
        if len(memory.rows) == 2:
            return memory.append(pos, span, k=keys, v=values)
        return memory.append(pos, span.squeeze(1), k=keys.transpose(1, 2), v=values.transpose(1, 2))

    def _read_kv(self, memory: ExpiringMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v [B, Hkv, S, D], span [B, 1 or Hkv, S], k_pos [B, S] or [B, Hkv, S]."""
        if not len(memory):
            heads = self.config.num_kv_heads
            outputs = heads if len(memory.rows) == 2 else 1
            none = memory.span.new_zeros(memory.rows[0], heads, 0, self.config.head_dim)
            return none, none, memory.span.new_zeros(memory.rows[0], outputs, 0), memory.pos
        if len(memory.rows) == 2:
            return memory["k"], memory["v"], memory.span, memory.pos
        return memory["k"].transpose(1, 2), memory["v"].transpose(1, 2), memory.span.unsqueeze(1), memory.pos

    def _store(self, memory: ExpiringMemory, h: Tensor, pos: Tensor) -> ExpiringMemory:
        return self._append_kv(memory, pos, self._predict_by_head(h), self._keys(h, pos), self._split(self.value(h)))

    def _predict_by_head(self, h: Tensor) -> Tensor:
        """Spans [B, Hkv, S] of a store that has a row for each head, or [B, 1, S]."""
        return spans_of_heads(self.span_predictor(h), self.config.num_kv_heads)

    # The attention

    def _noisy(self, span: Tensor) -> Tensor:
        """One random limit for all spans of a training forward; deletion keeps to the unclamped ones."""
        if not (self.training and self.mixer.noisy):
            return span
        return torch.minimum(span, torch.rand((), device=span.device) * self.mixer.max_span)

    def _attend(self, x: Tensor, k: Tensor, v: Tensor, span: Tensor, pos: Tensor, k_pos: Tensor) -> Tensor:
        m = self.mixer
        q = self._place(self._split(self.query(x)), pos)
        y = expire_attention(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            span.squeeze(1) if span.shape[1] == 1 else span,
            pos,
            k_pos,
            ramp=m.ramp,
            include_self=m.include_self,
            relative_keys=self._shared[0],
            normalizer_eps=m.normalizer_eps,
            impl=m.impl,
            check_values=False,
        )
        return self.out(y.transpose(1, 2).flatten(2))

    def _report(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> MixerAux:
        k_pos = k_pos.unsqueeze(1) if k_pos.dim() == 2 else k_pos  # [B, 1 or Hkv, S] or [S]
        new = spans_of_heads(span.detach()[..., -count:], self.config.num_kv_heads).squeeze(1)
        if torch.is_grad_enabled():  # training asks for both, and a compiled block cannot hand out functions
            return MixerAux(self._span_loss(span, k_pos, start, count), new, self._live(span, k_pos, start, count))
        where = (span, k_pos, start, count)
        return MixerAux(partial(self._span_loss, *where), new, partial(self._live, *where))

    def _live(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        ramp, include_self = self.mixer.ramp, self.mixer.include_self
        alive = live_queries(span.detach(), k_pos, start, start + count - 1, ramp=ramp, include_self=include_self)
        return self._mean_over_heads(alive.sum(-1)).mean() / count

    def _span_loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor | None:
        """The price of this block's lifetimes for each row, [B]."""
        if self.mixer.span_loss == "l1":
            return self._mean_over_heads(span[..., -count:].mean(-1))
        loss = ramp_loss(span, k_pos, start, start + count - 1, ramp=self.mixer.ramp)
        return self._mean_over_heads(loss) / count

    def _mean_over_heads(self, x: Tensor) -> Tensor:
        """Of one number per row of spans [B, P], the mean over heads [B]; the last row stands for all that share it."""
        rows, heads = x.shape[1], self.config.num_kv_heads
        if rows in (1, heads):
            return x.mean(1)
        return (x[:, :-1].sum(1) + (heads - rows + 1) * x[:, -1]) / heads


def _with_heads(memory: ExpiringMemory) -> tuple[Tensor, Tensor]:
    """Spans and positions of a store, [B, 1 or Hkv, S]."""
    span, k_pos = memory.span, memory.pos
    return (span, k_pos) if span.dim() == 3 else (span.unsqueeze(1), k_pos.unsqueeze(1))
