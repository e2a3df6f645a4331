"""Decoding over slots: one layer of attention, one token of every row per step, with the memories changed in place.

On a GPU, the host waits for nothing during a step, and all numbers that change from step to step lie on the device, so that a
step can be recorded as a CUDA graph and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models import systems
from expire_span.models.kit.attention import AttentionMixer, subtract_projection
from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.kit.plain import are_plain
from expire_span.models.kit.rotary import angles_of_turns, turns_per_token
from expire_span.models.kit.window import WindowMixer
from expire_span.models.mixer import Mixer
from expire_span.ops.slots import SpanForm, attend_slots, slot_kernel_serves
from expire_span.store import ExpiringMemory
from expire_span.store.slot_memory import Memories, SlotMemory
from expire_span.store.slots import FRESH

from .step_products import StepStates, add_linear, fold_gain, folds, norm_linear


class StreamPosition:
    """The clock that the slots of all rows share, and each row's position in its own text, which gives its rotary angles.

    The clock shows `epoch` (when the last compaction was) plus `column` (the next fresh slot, on the host and as `on_device`);
    ages follow from it. Keys are rotated by positions in the row's own text, so that those of a prompt are stored as they were
    read: another rotation would round them again, and its angle would depend on when the row joined.
    """

    def __init__(
        self, device: torch.device, rotary: tuple[int, float] | None, dtype: torch.dtype, rows: int = 1
    ) -> None:
        self.column, self.epoch = 0, 0
        self.on_device = torch.zeros((), dtype=torch.int32, device=device)
        self.epochs = torch.zeros(rows, dtype=torch.int64, device=device)
        """For each row, the position in its own text of the token that goes into the first fresh slot."""
        self.turns = turns_per_token(*rotary, device) if rotary else None
        width, self.dtype = rotary[0] if rotary else 0, torch.promote_types(dtype, torch.float32)
        self.cos = torch.zeros(rows, FRESH, width, dtype=self.dtype, device=device)
        self.sin = torch.zeros_like(self.cos)
        self._steps = torch.arange(FRESH, device=device)
        self._angles, self._turned = (self.cos, self.sin), -1
        self.turn_to_epoch()

    @property
    def now(self) -> int:
        """What the clock shows for the next token."""
        return self.epoch + self.column

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """The cosines and sines of every row's next token, [B, 1, D]; views, which the layers of a step share."""
        if self._turned != self.column:
            self._angles = self.cos.narrow(1, self.column, 1), self.sin.narrow(1, self.column, 1)
            self._turned = self.column
        return self._angles

    def turn_to_epoch(self) -> None:
        """Compute the rotary angles of every row until the next compaction, from the epochs that the device holds."""
        if self.turns is None:
            return
        cos, sin = angles_of_turns(self.epochs.unsqueeze(1) + self._steps, self.turns, self.dtype)
        self.cos.copy_(torch.cat([cos, cos], -1))
        self.sin.copy_(torch.cat([-sin, sin], -1))  # for x cos + roll(x) sin

    def start_rows(self, rows: Tensor, position: int) -> None:
        """Take note that the next token of the rows with these indices stands at `position` of their own text."""
        self.epochs[rows] = position - self.column
        self.turn_to_epoch()

    def begin_epoch(self) -> None:
        """After a compaction, start the device's next epoch and compute its angles. The engine updates the host's numbers."""
        self.on_device.zero_()
        self.epochs += FRESH
        self.turn_to_epoch()

    def set(self, epoch: int, column: int) -> None:
        self.epoch, self.column = epoch, column
        self.epochs.fill_(epoch)
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
        self.memory = SlotMemory(
            self.kv_heads,
            self.head_dim,
            ramp=rules.ramp,
            cap=rules.cap,
            limit=rules.limit,
            fused=self.fused,
            like=weight,
        )

    # Memory

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

    def load(self, rows: Tensor, found: Memories, counts: list[int]) -> None:
        """Put memories into rows, with keys as they are: they have the positions of the row's own text. counts: what the memory
        counts."""
        self.memory.load(rows, self.clock.column, found, counts)

    def row_state(self, row: int) -> dict[str, Any]:
        """What a row holds, as the decoder's state of this layer: the inverse of `load`. The host waits for the device."""
        epoch, column = int(self.clock.epochs[row]), self.clock.column
        memory, position = self.memory.to_memory(column, epoch, row), epoch + column
        if isinstance(self.mixer, ExpiringAttention):
            if self.mixer.span_predictor.per_head:
                return {"memory": memory, "position": position}
            return {"memory": memory.shared_by_heads(), "position": position}
        state = self.mixer.initial_state(1)
        (ring,), held = state["rings"], min(len(memory), self.rules.limit)
        if held:
            ring["k"][:, :, -held:], ring["v"][:, :, -held:] = (memory[x][:, :, -held:] for x in ("k", "v"))
            ring["pos"][:, -held:] = memory.pos[:, 0, -held:]
        return {**state, "position": position, "seen": state["seen"] + position}

    # The step

    def add(self, states: StepStates) -> StepStates:
        """Store the new memory of the hidden states and add the layer's output to them, in place."""
        y = self._fused_step(states) if self.fused else self._plain_step(self.norm(states.x))
        if self.rules.cap is not None:
            self.memory.slots.evict(self.clock.on_device + 1 if self.fused else self.clock.column + 1)
        return add_linear(states.x, y, self.out, self.folded)

    def _without_own(self, y: Tensor, proj: Tensor) -> Tensor:
        """y [B, Hq * D], with the option without each head's projection on the token's own value, which gates do not change."""
        if not (isinstance(self.mixer, ExpiringAttention) and self.mixer.rules.subtract_own):
            return y
        inner = (self.heads + self.kv_heads) * self.head_dim
        own = proj[:, inner : inner + self.kv_heads * self.head_dim].unflatten(1, (self.kv_heads, 1, self.head_dim))
        heads = y.unflatten(1, (self.kv_heads, self.group, self.head_dim))
        return subtract_projection(heads, own).flatten(1)

    def _fused_step(self, states: StepStates) -> Tensor:
        from expire_span.ops.triton.slots import Fields, triton_step

        if self.folded:
            norm: Any = self.norm
            hidden, proj, eps = states.x, norm_linear(states, norm, self.weight), norm.eps
        else:
            hidden = self.norm(states.x)
            proj, eps = F.linear(hidden, self.weight), None
        r = self.rules
        y = triton_step(
            proj,
            hidden,
            self.form,
            Fields(*self.memory.fields),
            self.clock.on_device,
            self.memory.division(self.group),
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
        return self._without_own(y, proj)

    def _plain_step(self, h: Tensor) -> Tensor:
        column, proj = self.clock.column, F.linear(h, self.weight)
        inner = (self.heads + self.kv_heads) * self.head_dim
        end = inner + self.kv_heads * self.head_dim
        both = proj[:, :inner].view(len(h), -1, self.head_dim)  # queries and keys, [B, Hq + Hkv, D]
        if self.normed:
            both = F.rms_norm(both, (self.head_dim,))
        if self.turned:
            both = self._turn(both)
        gates = None
        if self.gate_bias is not None:
            gates = 2 * torch.sigmoid(proj[:, end : end + self.heads] + self.gate_bias).to(proj.dtype)
        span = self._spans(h, proj, end + (0 if gates is None else self.heads))
        new_values = proj[:, inner:end].view(len(h), self.kv_heads, -1)
        keys, values, spans, births = self.memory.reading
        if self.rules.include_self:
            self.memory.store(both[:, self.heads :], new_values, span, column)
        remaining = births - column
        age = -remaining if self.relative is not None else None
        remaining += spans
        y = attend_slots(
            both[:, : self.heads],
            keys,
            values,
            remaining,
            ramp=self.rules.ramp,
            scale=self.scale,
            age=age,
            relative_keys=self.relative,
            normalizer_eps=self.rules.normalizer_eps,
        )
        if not self.rules.include_self:
            y = y.nan_to_num_(0.0)  # softmax over no memories is NaN, and such a query's output is defined as zero
            self.memory.store(both[:, self.heads :], new_values, span, column)
        return self._without_own((y if gates is None else y * gates.unsqueeze(-1)).flatten(1), proj)

    def _turn(self, both: Tensor) -> Tensor:
        cos, sin = self.clock.angles
        turned = torch.addcmul(both * cos, both.roll(self.head_dim // 2, -1), sin)
        return turned if turned.dtype == both.dtype else turned.to(both.dtype)

    def _spans(self, h: Tensor, proj: Tensor, end: int) -> Tensor:
        """The spans of the new memories, [B, Hkv]."""
        if self.constant:
            return self.form.low
        logits = proj[:, end:] if self.joins_span else F.linear(h.float(), self.form.weight)
        return torch.addcmul(self.form.low, torch.sigmoid(logits + self.form.bias), self.form.room)
