"""Attention over memories whose lifetimes are decided when they are written.

`expire_span`, `full`, `transformer_xl` and `adaptive_span` are built on it; they differ in their lifetimes only. The mask is

    m_ti = clamp(1 + (e_i - (t - i)) / R, 0, 1)

The caller chooses what a state keeps. With "hidden", a `HiddenMemory` of hidden states: keys, values and spans are recomputed
from them in every block, so that all weights get gradients through old memories. With "kv", an `ExpiringMemory` of keys and
values, which are computed once. With "nothing", a block attends to itself only. Both stores delete dead memories by one rule.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.lifetimes import LifetimeRule
from expire_span.models.marks import override
from expire_span.models.mixer import Keep, MixerAux, MixerOutput, Recordable, check_start
from expire_span.ops import attend_in_segments, can_attend_in_segments, expire_attention, resolve_impl, spans_of_heads
from expire_span.ops.context import active_context
from expire_span.ops.slots import attend_slots
from expire_span.store import ExpiringMemory, HiddenMemory, trim_states
from expire_span.store.steps import StepMemory

from .attention import AttentionMixer, share_heads, subtract_projection
from .precision import storage_dtype
from .rotary import rotate


@dataclass(frozen=True)
class ExpiryRules:
    """Everything beside the lifetimes that decides how memories are read and limited; see `ExpireSpanConfig` for each field."""

    cap: int | None = None
    include_self: bool = True
    initial_memories: int = 0
    normalizer_eps: float = 0.0
    impl: Any = "auto"
    causal: bool = True
    """False for encoders: a memory's age is its distance, and queries read later memories too."""
    subtract_own: bool = False


class ExpiringAttention(AttentionMixer):
    """State {"memory": HiddenMemory, ExpiringMemory or None, "position": int}; a caller may add, for the next block, "marks"
    [B, T] to keys and values (models/marks.py), or "episodes" [B, T] to hidden states (`reads_episodes`).

    Subclasses build the lifetimes (`span_predictor`) and say how memories are read and limited (`rules`).
    """

    reads_parts = True

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.rules = self.build_rules()
        self.span_predictor = self.build_lifetimes()

    @abstractmethod
    def build_lifetimes(self) -> LifetimeRule:
        """The rule that gives memories their spans."""

    def build_rules(self) -> ExpiryRules:
        return ExpiryRules()

    def look_both_ways(self) -> None:
        """Make the layer bidirectional, for encoders; it then carries no memory between calls."""
        self.rules = replace(self.rules, causal=False)
        self.span_predictor.causal = False

    @property
    def reads_episodes(self) -> bool:
        return (
            self.rules.causal and not self.rules.initial_memories
        )  # which would stand at the beginning of every episode

    def recordable(self) -> Recordable:
        device, head_dim = self.query.weight.device, self.shape.head_dim
        recordable = resolve_impl(self.rules.impl, device, head_dim=head_dim) == "triton"
        return Recordable(shapes=True, alone=recordable, carried=recordable)

    # States

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        """An empty memory, or one that holds `initial_memories` zero vectors; see `Mixer.initial_state`."""
        check_start(batch, keep)
        if keep != "nothing" and torch.compiler.is_exporting():
            raise ValueError(
                f"torch.export records fixed shapes, and memories have none; export keep='nothing', got {keep!r}"
            )
        count = self.rules.initial_memories
        if keep == "nothing" and not count:
            return {"memory": None, "position": 0}
        if keep == "kv":
            return {"memory": self._initial_memory(batch, empty, 0), "position": 0}
        h, device = self._blank(batch, empty), self.query.weight.device
        memory = HiddenMemory.empty(batch, self.shape.dim, dtype=storage_dtype(h), device=device)
        start = torch.arange(-count, 0, device=device).expand(batch, -1)
        return {"memory": HiddenMemory(h.to(memory.hidden.dtype), start, memory.evicted), "position": 0}

    def _blank(self, batch: int, empty: Tensor | None) -> Tensor:
        """The hidden states of initial memories, [B, initial_memories, C]."""
        zeros = empty if empty is not None else self.query.weight.new_zeros(self.shape.dim)
        return zeros.detach().expand(batch, self.rules.initial_memories, -1)

    def _initial_memory(self, batch: int, empty: Tensor | None, position: int) -> ExpiringMemory:
        """Keys and values of the initial memories, which stand before `position`."""
        rows = (batch, self.shape.num_kv_heads) if self.span_predictor.per_head else (batch,)
        device, rule = self.query.weight.device, self.span_predictor
        memory = ExpiringMemory.empty(rows, ramp=rule.ramp, cap=self.rules.cap, device=device)
        if not self.rules.initial_memories:
            return memory
        h, pos = self._blank(batch, empty), torch.arange(-self.rules.initial_memories, 0, device=device) + position
        with torch.no_grad():
            return self._append(memory, pos, rule.by_head(h), self.keys(h, pos), self.values(h))

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        """Empty the rows marked in `fresh` [B] (bool). Their positions go on: attention depends on distances only."""
        memory = state["memory"]
        if memory is None:
            return state
        if isinstance(memory, StepMemory):
            return {**state, "memory": memory.forget_rows(fresh)}
        if isinstance(memory, HiddenMemory):
            start = self.initial_state(memory.pos.shape[0], "hidden", empty=empty)["memory"]
            return {**state, "memory": memory.forget_rows(fresh, start)}
        memory = memory.forget_rows(fresh)
        if self.rules.initial_memories:
            memory = memory.join(self._initial_memory(memory.rows[0], empty, state["position"]).forget_rows(~fresh))
        return {**state, "memory": memory}

    # Reading without memory, from hidden states, and from keys and values

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        if not isinstance(state, dict) or "position" not in state:
            raise ValueError(f"the state is not one that this layer made, got {type(state).__name__}; begin with None")
        (state,) = trim_states([state])
        memory = state["memory"]
        if active_context() is not None:
            self._check_parts(memory)
        if isinstance(memory, HiddenMemory):
            episodes = state.get("episodes")
            return self._read_hidden(x, memory, state) if episodes is None else self._read_episodes(x, memory, episodes)
        if isinstance(memory, StepMemory):
            return self._read_step(x, memory, state)
        if memory is None:
            return self._read_block(x, state["position"])
        if memory.segments is not None and active_context() is None and self._can_read_in_place(x):
            return self._read_in_place(x, memory, state["position"], state.get("marks"))
        return self._read_kv(x, memory, state["position"], state.get("marks"))

    def _check_parts(self, memory: Any) -> None:
        """Refuse what needs the whole sequence in one place."""
        noisy = self.training and getattr(getattr(self.settings, "paper", None), "noisy", False)
        learns = isinstance(memory, ExpiringMemory) and torch.is_grad_enabled()
        for name, used in (
            ("gradients through states of keys and values", learns),
            ("initial_memories", self.rules.initial_memories > 0),
            ("a cap on carried memories", self.rules.cap is not None and memory is not None),
            ("paper.noisy", noisy),
        ):
            if used:
                raise ValueError(
                    f"in a context, a layer reads one part of a sequence and has no {name}; leave it out, and begin with "
                    'keep="nothing" or keep="hidden"'
                )

    def _read_block(self, x: Tensor, start: int) -> MixerOutput:
        """A block without memory before it."""
        first = start + _tokens_before(x)
        pos = torch.arange(first, first + x.shape[1], device=x.device)
        keys, (values, span) = self.keys(x, pos), self.span_predictor.with_values(x, self.value)
        y = self.attend(x, keys, self.split_heads(values), span, pos, pos)
        return MixerOutput(
            y, {"memory": None, "position": start + _tokens_in_all(x)}, self._report(span, pos, start, len(pos))
        )

    def _read_hidden(self, x: Tensor, memory: HiddenMemory, state: dict[str, Any]) -> MixerOutput:
        """Stored and new hidden states become keys, values and spans, all computed with the current weights."""
        start, count = state["position"], x.shape[1]
        first, block = start + _tokens_before(x), _tokens_in_all(x)
        pos = torch.arange(first, first + count, device=x.device)
        h, k_pos = memory.extended(x.to(storage_dtype(x)), pos)  # [B, S + T, C]
        keys, (values, span) = self.keys(h, k_pos), self.span_predictor.with_values(h, self.value)
        y = self.attend(x, keys, self.split_heads(values), span, pos, k_pos)
        aux = self._report(span, k_pos, start, count)
        longest = span.detach().amax(1)  # a hidden state lives while any head needs it
        limits: dict[str, Any] = dict(ramp=self.span_predictor.ramp, cap=self.rules.cap)
        memory = memory.after(h, k_pos, longest, block=block, added=count, **limits)
        aux.bytes_held = memory.bytes_held
        return MixerOutput(y, {"memory": memory, "position": start}, aux)

    def _read_episodes(self, x: Tensor, memory: HiddenMemory, episodes: Tensor) -> MixerOutput:
        """A block whose rows hold several episodes, numbered from 0 for the one to which the memories belong, between which
        there is no attention. The memory stays as it was."""
        count = x.shape[1]
        pos = torch.arange(count, device=x.device)
        h, k_pos = memory.extended(x.to(storage_dtype(x)), pos)
        keys, (values, span) = self.keys(h, k_pos), self.span_predictor.with_values(h, self.value)
        of_memories = F.pad(episodes, (k_pos.shape[1] - count, 0))
        y = self.attend(x, keys, self.split_heads(values), span, pos, k_pos, (episodes, of_memories))
        aux = MixerAux(span=spans_of_heads(span.detach()[..., -count:], self.shape.num_kv_heads).squeeze(1))
        return MixerOutput(y, {"memory": memory, "position": 0}, aux)

    # Steps without gradients

    def begin_steps(self, state: dict[str, Any], count: int) -> dict[str, Any]:
        memory, r = state["memory"], self.rules
        if (
            not isinstance(memory, HiddenMemory)
            or r.cap is not None
            or r.initial_memories
            or active_context() is not None
        ):
            return state
        keys = self.keys(memory.hidden, memory.pos)
        values, span = self.span_predictor.with_values(memory.hidden, self.value)
        span = span if span.shape[1] == 1 else spans_of_heads(span, self.shape.num_kv_heads)
        steps = torch.arange(count, device=keys.device)
        angles = self.angles(steps, keys.dtype) if self.shape.positions == "rotary" else None
        given = (keys, self.split_heads(values), span, angles, self.span_predictor.ramp)
        return {**state, "memory": StepMemory.begin(memory, *given, count)}

    def end_steps(self, state: dict[str, Any]) -> dict[str, Any]:
        memory = state["memory"]
        return {**state, "memory": memory.end()} if isinstance(memory, StepMemory) else state

    def _read_step(self, x: Tensor, memory: StepMemory, state: dict[str, Any]) -> MixerOutput:
        """One token of every row, whose keys, values and span are computed, and all older ones read as they are."""
        h, now, heads = x.to(storage_dtype(x)), memory.now, self.shape.num_kv_heads
        both = torch.cat([self.split_heads(self.query(x)), self.split_heads(self.key(h))], 1)  # [B, Hq + Hkv, 1, D]
        both = F.rms_norm(both, (self.shape.head_dim,)) if self.shape.qk_norm else both
        both = rotate(both, (memory.angles[0][now], memory.angles[1][now])) if memory.angles is not None else both
        q, k = both[:, :-heads], both[:, -heads:]
        values, span = self.span_predictor.with_values(h, self.value)
        span = span if span.shape[1] == 1 else spans_of_heads(span, heads)
        after = memory.add(h, k, self.split_heads(values), span)
        y = self._attend_step(q, after if self.rules.include_self else memory, now)
        aux = self._report(after.span[..., : after.used], after.pos[:, : after.used], now, 1)
        aux.bytes_held = after.bytes_held
        y = self.without_own(y, self.split_heads(values))
        return MixerOutput(self.join_heads(y, x), {**state, "memory": after}, aux)

    def _attend_step(self, q: Tensor, memory: StepMemory, now: int) -> Tensor:
        """q [B, Hq, 1, D] over the slots in use -> [B, Hq, 1, D]; zero where a query sees nothing."""
        if not memory.used:
            return torch.zeros_like(q)
        k, v = (a[:, :, : memory.used].to(q.dtype) for a in (memory.k, memory.v))
        remaining = memory.remaining(now)
        age = None
        if self.relative_keys is not None:
            age = (now - memory.pos[:, None, : memory.used]).expand(-1, k.shape[1], -1)
        rules: dict[str, Any] = dict(ramp=memory.ramp, scale=self.shape.head_dim**-0.5)
        rules |= dict(age=age, relative_keys=self.relative_keys, normalizer_eps=self.rules.normalizer_eps)
        y = attend_slots(q.squeeze(2), k, v, remaining, **rules)
        return (y if self.rules.include_self else y.nan_to_num_(0.0)).unsqueeze(2)

    def _marked(self, x: Tensor, marks: Tensor | None) -> Tensor:
        """Spans [B, 1 or Hkv, T] of new memories, with the lifetimes that a caller has marked."""
        return override(self.span_predictor.by_head(x), marks, self.span_predictor.ramp)

    def _read_kv(self, x: Tensor, memory: ExpiringMemory, start: int, marks: Tensor | None) -> MixerOutput:
        """Keys and values are computed once and stored detached; within this block, gradients pass through them."""
        first = start + _tokens_before(x)
        pos = torch.arange(first, first + x.shape[1], device=x.device)
        new = self.keys(x, pos), self.values(x), self._marked(x, marks)
        stored = self._append(memory, pos, new[2], new[0], new[1])
        if torch.is_grad_enabled() and new[0].requires_grad:
            old = self._fields(memory)
            keys, values, span = (torch.cat([a.to(b.dtype), b], 2) for a, b in zip(old[:3], new))
            k_pos = torch.cat([old[3], pos.expand(*old[3].shape[:-1], -1)], -1)
        else:
            keys, values, span, k_pos = self._fields(stored)
        y = self.attend(x, keys, values, span, pos, k_pos)
        aux = self._report(span, k_pos, start, len(pos))
        return self._store_and_return(y, stored, start + _tokens_in_all(x), aux)

    def _can_read_in_place(self, x: Tensor) -> bool:
        """Whether the decode kernel can read rows of unequal length in place: few tokens, on a GPU that it serves."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        return can_attend_in_segments(self.rules.impl, x.device, x.shape[1], self.shape.head_dim, dtype)

    def _read_in_place(self, x: Tensor, memory: ExpiringMemory, start: int, marks: Tensor | None) -> MixerOutput:
        """The same as `_read_kv`, without gathering a rectangle of all rows."""
        pos = torch.arange(start, start + x.shape[1], device=x.device)
        new = self._marked(x, marks)
        values = self.values(x)
        memory = self._append(memory, pos, new, self.keys(x, pos), values)
        k, v, span, k_pos = (memory.slots[name] for name in ("k", "v", "span", "pos"))
        rules: dict[str, Any] = dict(ramp=self.span_predictor.ramp, include_self=self.rules.include_self)
        rules |= dict(relative_keys=self.relative_keys, normalizer_eps=self.rules.normalizer_eps)
        y = attend_in_segments(self.queries(x, pos), k, v, span, pos, k_pos, memory.row_places(), **rules)
        aux = self._report_later(memory, new, start, len(pos))
        y = self.join_heads(self.without_own(y, values), x)
        return self._store_and_return(y, memory, start + len(pos), aux)

    def _store_and_return(self, y: Tensor, memory: ExpiringMemory, position: int, aux: MixerAux) -> MixerOutput:
        memory = memory.expire(position)
        aux.bytes_held = memory.bytes_held
        return MixerOutput(y, {"memory": memory, "position": position}, aux)

    def _append(self, memory: ExpiringMemory, pos: Tensor, span: Tensor, k: Tensor, v: Tensor) -> ExpiringMemory:
        """k, v [B, Hkv, T, D] and spans [B, 1 or Hkv, T] into a store with rows (B,) or (B, Hkv)."""
        if len(memory.rows) == 2:
            return memory.append(pos, span, check_values=False, k=k, v=v)
        return memory.append(pos, span.squeeze(1), check_values=False, k=k.transpose(1, 2), v=v.transpose(1, 2))

    def _fields(self, memory: ExpiringMemory) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """k, v [B, Hkv, S, D], span [B, 1 or Hkv, S], k_pos [B, S] or [B, Hkv, S]."""
        if not len(memory):
            heads = self.shape.num_kv_heads
            outputs = heads if len(memory.rows) == 2 else 1
            none = memory.span.new_zeros(memory.rows[0], heads, 0, self.shape.head_dim)
            return none, none, memory.span.new_zeros(memory.rows[0], outputs, 0), memory.pos
        if len(memory.rows) == 2:
            return memory["k"], memory["v"], memory.span, memory.pos
        return memory["k"].transpose(1, 2), memory["v"].transpose(1, 2), memory.span.unsqueeze(1), memory.pos

    # Attention and report

    def attend(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        span: Tensor,
        pos: Tensor,
        k_pos: Tensor,
        documents: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        q, span = self.queries(x, pos), self.span_predictor.limit_noisily(span)
        y = expire_attention(
            q,
            k.to(q.dtype),
            v.to(q.dtype),
            span.squeeze(1) if span.shape[1] == 1 else span,
            pos,
            k_pos,
            ramp=self.span_predictor.ramp,
            causal=self.rules.causal,
            include_self=self.rules.include_self,
            relative_keys=self.relative_keys,
            normalizer_eps=self.rules.normalizer_eps,
            documents=documents,
            impl=self.rules.impl,
            check_values=False,
        )
        return self.join_heads(self.without_own(y, v[:, :, -x.shape[1] :]), x)

    def without_own(self, y: Tensor, own: Tensor) -> Tensor:
        """Heads' outputs [B, Hq, T, D], with the option without their projections on the tokens' own values [B, Hkv, T, D]."""
        return subtract_projection(y, share_heads(own, y.shape[1])) if self.rules.subtract_own else y

    def _report(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> MixerAux:
        """The report of a block of `count` queries from position `start` on, over memories with span [B, P, S] and k_pos."""
        k_pos = k_pos.unsqueeze(1) if k_pos.dim() == 2 else k_pos  # [B, 1 or Hkv, S] or [S]
        new = spans_of_heads(span.detach()[..., -count:], self.shape.num_kv_heads).squeeze(1)
        context = active_context()
        new, rule = new if self.span_predictor.reports_spans else None, self.span_predictor
        where = (start, count) if context is None else (start, count, context.total(count))
        if torch.is_grad_enabled():  # training reads both, and a compiled block cannot return functions
            return MixerAux(rule.loss(span, k_pos, *where), new, rule.live(span, k_pos, *where))
        return MixerAux(partial(rule.loss, span, k_pos, *where), new, partial(rule.live, span, k_pos, *where))

    def _report_later(self, memory: ExpiringMemory, new: Tensor, start: int, count: int) -> MixerAux:
        """A report that gathers the memories of all rows only when its loss or live count is read."""

        def ask(question: Any) -> Any:
            span, k_pos = memory.span, memory.pos
            both = (span, k_pos) if span.dim() == 3 else (span.unsqueeze(1), k_pos.unsqueeze(1))
            return question(*both, start, count)

        rule = self.span_predictor
        new_spans = new.squeeze(1) if rule.reports_spans else None
        return MixerAux(partial(ask, rule.loss), new_spans, partial(ask, rule.live))


def _tokens_before(x: Tensor) -> int:
    """Number of tokens of the block before x [B, T, C]: none, unless x is one part of a block that is read in parts."""
    context = active_context()
    return 0 if context is None else context.first(x.shape[1])


def _tokens_in_all(x: Tensor) -> int:
    """Number of tokens of the block to which x [B, T, C] belongs."""
    context = active_context()
    return x.shape[1] if context is None else context.total(x.shape[1])
