"""Gated DeltaNet: the gated delta rule between a short convolution and a gated norm.

    q, k, v = silu(convolution over the last steps of W x), q and k scaled to length 1
    b = sigmoid(w . x),  g = -exp(A) softplus(w' . x + dt)
    y = W_out (rms_norm(rule(q, k, v, g, b)) silu(W_gate x))

The number of heads and the sizes of keys and values are settings of this system, independent of the model's heads. The order of
tokens shows in the convolution and in the decay, so no positions are added. The state has a fixed size and streaming is exact.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.kit.attention import empty_rows
from expire_span.models.kit.fla import resolve_kernels
from expire_span.models.kit.fla_kernels import gated_delta_kernel
from expire_span.models.mixer import Keep, Mixer, MixerAux, MixerOutput, Recordable
from expire_span.models.state import bytes_of
from expire_span.models.systems.gated_deltanet import DeltaShape, GatedDeltaNetConfig

from .rule import chunked_delta_rule

STRONGEST_FADING, SHORTEST_STEP, LONGEST_STEP = 16.0, 1e-3, 1e-1
"""Initial values: exp(A) lies between 0 and the first, softplus(dt) between the other two. Half-lives then range from a few
steps to thousands."""


class GatedDeltaNet(Mixer):
    """State {"matrix": [B, H, K, V], "recent": last inputs of the convolution [B, conv - 1, channels]}."""

    settings_class: ClassVar[type] = GatedDeltaNetConfig
    settings: GatedDeltaNetConfig
    fixed_state = True

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        dim, own = self.shape.dim, DeltaShape.of(self.shape, self.settings)
        self.own = own
        self.query = nn.Linear(dim, own.heads * own.key, bias=False)
        self.key = nn.Linear(dim, own.heads * own.key, bias=False)
        self.value = nn.Linear(dim, own.heads * own.value, bias=False)
        self.gate = nn.Linear(dim, own.heads * own.value, bias=False)
        self.strength = nn.Linear(dim, own.heads, bias=False)
        self.fading = nn.Linear(dim, own.heads, bias=False)
        self.out = nn.Linear(own.heads * own.value, dim, bias=False)
        bound = own.conv**-0.5
        taps = torch.empty(own.conv, 1, own.channels).uniform_(-bound, bound)
        self.taps = nn.Parameter(taps)  # weights of the convolution, the oldest step first
        self.norm_weight = nn.Parameter(torch.ones(own.value))
        self.log_fading = nn.Parameter(torch.empty(own.heads).uniform_(1e-3, STRONGEST_FADING).log())
        step = torch.empty(own.heads).uniform_(math.log(SHORTEST_STEP), math.log(LONGEST_STEP)).exp()
        self.step_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step

    def recordable(self) -> Recordable:
        return Recordable(alone=True)

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        own, device = self.own, self.out.weight.device
        dtype = torch.promote_types(self.out.weight.dtype, torch.float32)
        matrix = torch.zeros(batch, own.heads, own.key, own.value, dtype=dtype, device=device)
        return {"matrix": matrix, "recent": torch.zeros(batch, own.conv - 1, own.channels, dtype=dtype, device=device)}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        own = self.own
        given = torch.cat([self.query(x), self.key(x), self.value(x)], -1)  # [B, T, channels]
        whole = torch.cat([state["recent"].to(given.dtype), given], 1)
        mixed = self._convolve(whole, x.shape[1])
        q, k, v = mixed.split([own.heads * own.key, own.heads * own.key, own.heads * own.value], -1)
        q, k, v = (part.unflatten(-1, (own.heads, -1)) for part in (q, k, v))  # [B, T, H, .]
        q, k = (_to_length_one(part) for part in (q, k))
        log_gate, strength = self._gates(x)
        y, matrix = self._apply_rule(q, k, v, log_gate, strength, state["matrix"])
        y = self._gated_norm(y, self.gate(x).unflatten(-1, (own.heads, -1)))
        recent = whole[:, whole.shape[1] - own.conv + 1 :].detach()
        after = {"matrix": matrix.detach(), "recent": recent.to(state["recent"].dtype, copy=True)}
        aux = MixerAux(live=torch.ones((), device=x.device), bytes_held=bytes_of(after))
        return MixerOutput(self.out(y.flatten(2)), after, aux)

    def _convolve(self, x: Tensor, count: int) -> Tensor:
        """Each channel's weighted sum over the last steps, [B, conv - 1 + T, channels] -> [B, T, channels].

        It is written as a sum of shifted products, which torch.compile fuses with the operations before and after it.
        """
        taps = self.taps.to(x.dtype)
        total = x[:, :count] * taps[0]
        for n in range(1, self.own.conv):
            total = total + x[:, n : n + count] * taps[n]
        return F.silu(total)

    def _gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log gate and writing strength [B, T, H], in float32 or better."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.fading.weight.dtype)
            step = -(self.fading(x) + self.step_bias)
            # logsigmoid(step) is -softplus(-step); torch.compile knows the strides of its result.
            log_gate = self.log_fading.exp() * F.logsigmoid(step)
            return log_gate, self.strength(x).sigmoid()

    def _apply_rule(self, q, k, v, log_gate, strength, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """q, k, v [B, T, H, .] -> y [B, T, H, V] and the matrix after."""
        sizes = {"count": q.shape[1], "channels": min(q.shape[-1], v.shape[-1])}
        impl = resolve_kernels(self.settings.impl, "gated_deltanet", q.device, v.dtype, **sizes)
        if impl == "fla":
            return gated_delta_kernel(q.to(v.dtype), k.to(v.dtype), v, log_gate, strength, matrix)
        with torch.autocast(q.device.type, enabled=False):
            parts = [part.to(matrix.dtype).transpose(1, 2) for part in (q, k, v, log_gate, strength)]
            y, matrix = chunked_delta_rule(*parts, state=matrix, chunk=self.settings.chunk)
        return y.transpose(1, 2), matrix

    def _gated_norm(self, y: Tensor, gate: Tensor) -> Tensor:
        """Root-mean-square norm of each head's output times silu of the gate, in the gate's dtype."""
        precise = torch.promote_types(y.dtype, torch.float32)
        normed = F.rms_norm(y.to(precise), (self.own.value,), self.norm_weight.to(precise), 1e-5)
        return (normed * F.silu(gate.to(precise))).to(gate.dtype)


def _to_length_one(x: Tensor) -> Tensor:
    """Scale the last dimension to length 1, in float32 or better."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
