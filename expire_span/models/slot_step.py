"""Decoding over slots: one layer of attention, one token of every row per step, with the memories changed in place.

On a GPU, the host waits for nothing during a step, and all numbers that change from step to step lie on the device, so that a
step can be recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models import systems
from expire_span.models.kit.attention import AttentionMixer
from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.kit.plain import are_plain
from expire_span.models.kit.rotary import rotary_angles, rotate
from expire_span.models.kit.window import WindowMixer
from expire_span.models.mixer import Mixer
from expire_span.ops.slots import SpanForm, attend_slots, slot_kernel_serves
from expire_span.store import ExpiringMemory
from expire_span.store.slots import DEAD, FRESH, Slots, choose_capacity, count_living, split_by_head

from .step_products import StepStates, add_linear, fold_gain, folds, norm_linear

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


class StreamPosition:
    """The position of the next token, common to all rows of a stream, and the rotary angles for it.

    The position is `epoch` (that of the last compaction) plus `column` (the next fresh slot); both exist on the host and on the
    device. Rows that began at different times share one clock, since attention depends on distances only.
    """

    def __init__(self, device: torch.device, rotary: tuple[int, float] | None, dtype: torch.dtype) -> None:
        self.column, self.epoch = 0, 0
        self.on_device = torch.zeros((), dtype=torch.int32, device=device)
        self.epoch_on_device = torch.zeros((), dtype=torch.int64, device=device)
        self.rotary, self.dtype = rotary, torch.promote_types(dtype, torch.float32)
        width = rotary[0] if rotary else 0
        self.cos = torch.zeros(FRESH, width, dtype=self.dtype, device=device)
        self.sin = torch.zeros_like(self.cos)
        self._steps = torch.arange(FRESH, device=device)
        self.turn_to_epoch()

    @property
    def now(self) -> int:
        """Position of the next token."""
        return self.epoch + self.column

    def turn_to_epoch(self) -> None:
        """Compute the rotary angles of all positions until the next compaction, from the epoch that the device holds."""
        if self.rotary is None:
            return
        cos, sin = rotary_angles(self.epoch_on_device + self._steps, *self.rotary, self.dtype)
        self.cos.copy_(torch.cat([cos, cos], 1))
        self.sin.copy_(torch.cat([-sin, sin], 1))  # for x cos + roll(x) sin

    def begin_epoch(self) -> None:
        """After a compaction, start the device's next epoch and compute its angles. The engine updates the host's numbers."""
        self.on_device.zero_()
        self.epoch_on_device += FRESH
        self.turn_to_epoch()

    def set(self, epoch: int, column: int) -> None:
        self.epoch, self.column = epoch, column
        self.epoch_on_device.fill_(epoch)
        self.on_device.fill_(column)
        self.turn_to_epoch()


@dataclass(frozen=True)
class SlotRules:
    """How a layer fills and reads its slots."""

    ramp: float
    cap: int | None
    include_self: bool
    normalizer_eps: float
    limit: int
    """The most memories that a row and head can hold."""
    impl: str
    form: SpanForm
    """How spans follow from hidden states."""


def slot_rules(mixer: Mixer) -> SlotRules | None:
    """The rules of a layer that can keep its memories in slots, else None. A step reads the weights of its projections."""
    field = systems.find(mixer.settings.kind).receptive_field(systems.StateSize(mixer.shape, mixer.settings))
    if field is None or not isinstance(mixer, (ExpiringAttention, WindowMixer)):
        return None
    own_gate = mixer.head_gate is None or type(mixer.head_gate) is nn.Linear
    if not own_gate or not are_plain(mixer.query, mixer.key, mixer.value, mixer.out):
        return None
    if isinstance(mixer, ExpiringAttention):
        r, form = mixer.rules, mixer.span_predictor.span_form(mixer.shape.dim)
        if form is None or not r.causal:
            return None
        limit = min(field + 1, r.cap or field + 1)
        return SlotRules(mixer.span_predictor.ramp, r.cap, r.include_self, r.normalizer_eps, limit, r.impl, form)
    if not mixer.sinks and [band.dilation for band in mixer.bands] == [1]:
        window = mixer.bands[0].window  # a hard edge: with a ramp of 1, age `window` is the first that is dead
        form = SpanForm.constant(torch.full((mixer.shape.num_kv_heads,), window - 1.0), mixer.shape.dim)
        return SlotRules(1.0, None, True, 0.0, window, "auto", form)
    return None


class SlotStep:
    """One layer of attention over slots."""

    _division: tuple[Any, Any] = (None, None)

    def __init__(self, mixer: AttentionMixer, rules: SlotRules, clock: StreamPosition, norm: nn.Module) -> None:
        self.mixer, self.rules, self.clock, self.norm = mixer, rules, clock, norm
        shape, weight = mixer.shape, mixer.query.weight
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.num_kv_heads, shape.head_dim
        self.group, self.scale = self.heads // self.kv_heads, self.head_dim**-0.5
        self.form = SpanForm(*(x.to(weight.device).contiguous() for x in rules.form))
        self.fused = slot_kernel_serves(rules.impl, weight)
        self.folded = self.fused and folds(norm, weight)
        self.constant = not bool(self.form.weight.any()) and not bool(self.form.room.any())
        parts = [weight, mixer.key.weight, mixer.value.weight]
        gate, self.gate_bias = mixer.head_gate, None
        if gate is not None:
            self.gate_bias = gate.bias.detach().float()
            spare = -len(gate.weight) % 16 if self.fused else 0  # rows of the product stay aligned for wide stores
            parts.append(F.pad(gate.weight, (0, 0, 0, spare)))
        self.joins_span = not (self.fused or self.constant) and weight.dtype == torch.float32
        if self.joins_span:
            parts.append(self.form.weight)
        self.weight = torch.cat([x.detach() for x in parts])
        self.out = mixer.out.weight.detach()
        # The kernels get hidden states before the norm, so the norm's gain is multiplied into projections and predictor.
        if self.folded:
            assert isinstance(norm, nn.RMSNorm)
            self.weight = fold_gain(self.weight, norm)
            self.form = self.form._replace(weight=self.form.weight * norm.weight.detach().float())
        self.turned, self.normed = shape.positions == "rotary", shape.qk_norm
        self.relative = None if mixer.relative_keys is None else mixer.relative_keys.detach()
        self.edge = self.form.low + rules.ramp  # [Hkv]: span + ramp of the shortest possible span
        self.slots: Slots
        self.most: list[int] = [0] * self.kv_heads
        """For each head, the most older slots that any row had in use after the last compaction."""

    # Memory

    def allocate(self, rows: int, capacity: list[int] | None = None) -> None:
        """Create empty slots with `capacity` older slots per head; None takes the smallest capacity."""
        capacity = capacity or self.capacity_for([0] * self.kv_heads)
        weight, r = self.mixer.query.weight, self.rules
        self.slots = Slots(
            rows, self.head_dim, capacity, ramp=r.ramp, cap=r.cap, dtype=weight.dtype, device=weight.device
        )
        self._adopt()

    def capacity_for(self, needed: list[int]) -> list[int]:
        """Number of older slots per head with room for `needed` memories and for all that the fresh slots can hold."""
        wanted = [choose_capacity(n + FRESH, self.rules.limit) for n in needed]
        return wanted if self.fused else [max(wanted)] * len(wanted)  # plain PyTorch reads a rectangle

    def make_room(self, needed: list[int]) -> bool:
        """Grow the slots if `needed` memories and those of the fresh slots might not fit; returns whether they were grown."""
        have = self.slots.capacity
        if all(min(n + FRESH, self.rules.limit) <= size for n, size in zip(needed, have)):
            return False
        wanted = self.capacity_for([max(n, old) for n, old in zip(needed, self.most)])
        self.slots = self.slots.grown([max(a, b) for a, b in zip(have, wanted)])
        self._adopt()
        return True

    def _adopt(self) -> None:
        """Make the views of the slots that every step uses, after the slots were created or grown."""
        s = self.slots
        self.fields = (s.k, s.v, s.pos, s.edge, s.counts, s.bounds)
        if self.fused:
            return
        assert s.uniform
        shape = (s.rows, s.heads, FRESH + s.capacity[0])
        self.k, self.v = s.k.view(*shape, -1), s.v.view(*shape, -1)
        self.edges, self.births = s.edge.view(shape), s.pos.view(shape)
        self.refresh()

    def compact(self) -> None:
        """Delete dead memories, once all fresh slots are full. Only work on the device is done here."""
        if not self.fused:
            self.slots.compact()
            return
        from expire_span.ops.triton import triton_compact
        from expire_span.ops.triton.slots import Fields

        triton_compact(Fields(*self.fields), FRESH)

    def refresh(self) -> None:
        """On a CPU, limit what steps read to the older slots that can be in use, by the host's count."""
        if self.fused:
            return
        width = FRESH + max(self.most) if self.slots.k.device.type == "cpu" else self.k.shape[2]
        self.reading = [x.narrow(2, 0, width) for x in (self.k, self.v, self.edges, self.births)]

    def note_counts(self, counts: Tensor) -> None:
        """Take note of the older slots in use after a compaction: counts [rows, Hkv], on the host."""
        self.most = counts.amax(0).tolist()
        self.refresh()

    def memories(self, state: Any) -> Memories:
        """The memories in a state of this layer (the decoder's, after it has read a prompt), for `load`."""
        if isinstance(self.mixer, WindowMixer):
            ring = state["rings"][0]
            pos = ring["pos"].unsqueeze(1)
            span = torch.full(pos.shape, float(self.rules.limit - 1), device=pos.device)
            return Memories(ring["k"], ring["v"], span, pos, state["position"])
        assert isinstance(self.mixer, ExpiringAttention) and isinstance(state["memory"], ExpiringMemory)
        k, v, span, pos = self.mixer._fields(state["memory"])
        pos = pos if pos.dim() == 3 else pos.unsqueeze(1)
        return Memories(k, v, span, pos, state["position"])

    def read_saved(
        self, fields: dict[str, Tensor], capacity: list[int], fresh: int, epoch: int, column: int
    ) -> Memories:
        """The memories in saved fields of slots, `fresh` fresh and `capacity` older ones per head, for `load`."""
        sizes = [fresh + size for size in capacity]
        k, v, pos = (split_by_head(fields[name], sizes) for name in ("k", "v", "pos"))
        edge = split_by_head(fields["edge"], sizes, DEAD)
        return Memories(k, v, edge - self.rules.ramp, pos.long() + epoch, epoch + column)

    def load(self, rows: Tensor, found: Memories, counts: list[int]) -> None:
        """Put memories into rows; keys are rotated to the positions of this stream's clock. counts: what `count` finds."""
        keys = found.k
        if self.turned and keys.shape[2]:
            offset = torch.tensor(self.clock.now - found.now, device=keys.device)
            keys = rotate(keys, self.mixer.angles(offset, keys.dtype))
        self.fill(rows, found._replace(k=keys), counts)

    def fill(self, rows: Tensor, found: Memories, counts: list[int]) -> None:
        """Put memories whose keys have the right positions into rows."""
        self.slots.load(rows, self.clock.column, *found, widest=counts)
        self.most = [max(a, b) for a, b in zip(self.most, counts)]
        self.refresh()

    def count(self, found: Memories) -> Tensor:
        """For each head, the largest number of living memories of any row, [Hkv], on the device."""
        return count_living(found.span, found.pos, found.now, self.rules.ramp, self.kv_heads)

    # The step

    def add(self, states: StepStates) -> StepStates:
        """Store the new memory of the hidden states and add the layer's output to them, in place."""
        y = self._fused_step(states) if self.fused else self._plain_step(self.norm(states.x))
        if self.rules.cap is not None:
            self.slots.evict(self.clock.on_device + 1 if self.fused else self.clock.column + 1)
        return add_linear(states.x, y, self.out, self.folded)

    def _fused_step(self, states: StepStates) -> Tensor:
        from expire_span.ops.triton.slots import Fields, triton_step

        if self.folded:
            norm: Any = self.norm
            hidden, proj, eps = states.x, norm_linear(states, norm, self.weight), norm.eps
        else:
            hidden = self.norm(states.x)
            proj, eps = F.linear(hidden, self.weight), None
        r = self.rules
        return triton_step(
            proj,
            hidden,
            self.form,
            Fields(*self.fields),
            self.clock.on_device,
            self.division(self.group),
            group=self.group,
            fresh=FRESH,
            ramp=r.ramp,
            scale=self.scale,
            include_self=r.include_self,
            qk_norm=self.normed,
            hidden_eps=eps,
            angles=(self.clock.cos, self.clock.sin) if self.turned else None,
            relative_keys=self.relative,
            normalizer_eps=r.normalizer_eps,
            gate_bias=self.gate_bias,
        )

    def division(self, group: int) -> Division:
        """How the kernel's programs divide the slots among them; made again when the slots or the tiles have changed."""
        from expire_span.ops.triton.slot_tiles import count_programs, divide, tiles

        s = self.slots
        made_for = (s.rows, s.capacity, group, tiles())
        if self._division[0] != made_for:
            programs = count_programs([FRESH + size for size in s.capacity], s.rows * group)
            self._division = made_for, divide(programs, group, s.rows, s.k.device)
        return self._division[1]

    def _plain_step(self, h: Tensor) -> Tensor:
        column, proj = self.clock.column, F.linear(h, self.weight)
        inner = (self.heads + self.kv_heads) * self.head_dim
        end = inner + self.kv_heads * self.head_dim
        both = proj[:, :inner].view(len(h), -1, self.head_dim)  # queries and keys, [B, Hq + Hkv, D]
        if self.normed:
            both = F.rms_norm(both, (self.head_dim,))
        if self.turned:
            both = self._turn(both, column)
        gates = None
        if self.gate_bias is not None:
            gates = 2 * torch.sigmoid(proj[:, end : end + self.heads] + self.gate_bias).to(proj.dtype)
        edge = self._edges(h, proj, end + (0 if gates is None else self.heads))
        keys, values, edges, births = self.reading
        if self.rules.include_self:
            self._store(both, proj[:, inner:end], edge, column)
        left = births - column
        age = -left if self.relative is not None else None
        left += edges
        y = attend_slots(
            both[:, : self.heads],
            keys,
            values,
            left,
            ramp=self.rules.ramp,
            scale=self.scale,
            age=age,
            relative_keys=self.relative,
            normalizer_eps=self.rules.normalizer_eps,
        )
        if not self.rules.include_self:
            y = y.nan_to_num_(0.0)  # softmax over no memories is NaN, and such a query's output is defined as zero
            self._store(both, proj[:, inner:end], edge, column)
        return (y if gates is None else y * gates.unsqueeze(-1)).flatten(1)

    def _turn(self, both: Tensor, column: int) -> Tensor:
        cos, sin = self.clock.cos[column], self.clock.sin[column]
        turned = torch.addcmul(both * cos, both.roll(self.head_dim // 2, -1), sin)
        return turned if turned.dtype == both.dtype else turned.to(both.dtype)

    def _edges(self, h: Tensor, proj: Tensor, end: int) -> Tensor:
        """span + ramp of the new memories, [B, Hkv]."""
        if self.constant:
            return self.edge
        logits = proj[:, end:] if self.joins_span else F.linear(h.float(), self.form.weight)
        return torch.addcmul(self.edge, torch.sigmoid(logits + self.form.bias), self.form.room)

    def _store(self, both: Tensor, values: Tensor, edge: Tensor, column: int) -> None:
        self.k.select(2, column).copy_(both[:, self.heads :])
        self.v.select(2, column).copy_(values.view(len(values), self.kv_heads, -1))
        self.edges.select(2, column).copy_(edge)
