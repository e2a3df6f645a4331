"""Forget-gate attention, as in the Forgetting Transformer: score(t, i) = q_t . k_i / sqrt(D) + sum of log f_j, i < j <= t.

f = sigmoid(w . x + b), one gate per head and step. Nothing is deleted: the state grows with the stream. The running sum c of
log f is kept in float64, so that differences of it stay exact on long streams.

The sum of log gates is c_t - c_i. Since c_t is the same for all memories of a query, softmax cancels it. What remains, -c_i,
depends on the memory alone: it is written into a few additional dimensions of the key, where queries hold ones, so that torch's
fused attention adds it to the score. Learned relative positions must be added to the scores themselves: then queries are scored
in chunks, which the backward pass recomputes. In both cases memory use is linear in the length. On a GPU with the extra `fla`,
blocks with no memory before them run on that package's kernel, which has no input for keys of earlier blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expire_span.models.kit.attention import AttentionMixer, scaled_relative_scores, share_heads
from expire_span.models.kit.fla import resolve_kernels
from expire_span.models.kit.fla_kernels import forgetting_kernel
from expire_span.models.kit.precision import split_digits
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.forgetting import ForgettingConfig
from expire_span.models.systems.full.layer import FOREVER
from expire_span.store import NEVER, ExpiringMemory


class Forgetting(AttentionMixer):
    """State {"memory": ExpiringMemory of k, v and c_i, "total": c of the last token [B, Hq], "position": of the next}."""

    settings_class = ForgettingConfig
    settings: ForgettingConfig
    recordable_alone = True

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.chunk = self.settings.chunk
        self.gate = nn.Linear(self.shape.dim, self.shape.heads)
        nn.init.constant_(self.gate.bias, math.log(self.settings.initial_gate / (1 - self.settings.initial_gate)))

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        device = self.query.weight.device
        total = torch.zeros(batch, self.shape.heads, dtype=torch.float64, device=device)
        memory = ExpiringMemory.empty(batch, ramp=1, device=device)
        return {"memory": memory, "total": total, "position": 0, "keep": keep}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return {**state, "memory": state["memory"].forget_rows(fresh)}

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, memory = state["position"], state["memory"]
        q, k, v, pos = self.project(x, start)
        log_gate = self._log_gate(x)
        # The sum so far enters as the first summand: PyTorch 2.11 fails to compile this for a GPU if it is added afterwards.
        sums = torch.cat([state["total"].unsqueeze(2), log_gate.double()], 2).cumsum(2)[:, :, 1:]  # [B, H, T]
        k_pos, k_sums, keys, values = pos.expand(len(x), -1), sums, k, v
        if len(memory):
            k_pos = torch.cat([memory.pos, k_pos], 1)
            k_sums = torch.cat([memory["sums"].transpose(1, 2), sums], 2)
            keys = torch.cat([memory["k"].transpose(1, 2).to(k.dtype), k], 2)
            values = torch.cat([memory["v"].transpose(1, 2).to(v.dtype), v], 2)
        if self._has_kernel(q, memory):
            y = self._read_with_kernel(q, k, v, log_gate)
        else:
            y = self._read(q, share_heads(keys, q.shape[1]), share_heads(values, q.shape[1]), sums, k_sums, pos, k_pos)
        if state["keep"] != "nothing":
            span = torch.full((len(x), x.shape[1]), float(FOREVER), device=x.device)
            fields = {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "sums": sums.transpose(1, 2)}
            memory = memory.append(pos, span, check_values=False, **fields)
        after = {"memory": memory, "total": sums[:, :, -1].detach().clone(), "position": start + x.shape[1]}
        after["keep"] = state["keep"]
        live = (k_pos != NEVER).sum(1).float().mean() - (x.shape[1] - 1) / 2
        return MixerOutput(self.join_heads(y, x), after, MixerAux(live=live, bytes_held=bytes_of(after)))

    def _log_gate(self, x: Tensor) -> Tensor:
        """Log forget gates, [B, T, C] -> [B, H, T], in float32 or better."""
        with torch.autocast(x.device.type, enabled=False):
            return F.logsigmoid(self.gate(x.to(self.gate.weight.dtype))).transpose(1, 2)

    def _has_kernel(self, q: Tensor, memory: ExpiringMemory) -> bool:
        """Whether the fla package's kernel serves this block: one with no memory before it and no relative positions."""
        if len(memory) or self.relative_keys is not None:
            return False
        dtype = attention_dtype(q)
        return resolve_kernels(self.settings.impl, "forgetting", q.device, dtype, count=q.shape[2]) == "fla"

    def _read_with_kernel(self, q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor) -> Tensor:
        q, k, v = (x.to(attention_dtype(q)).transpose(1, 2) for x in (q, k, v))
        return forgetting_kernel(q, k, v, log_gate.transpose(1, 2)).transpose(1, 2)

    def _read(self, q, k, v, sums, k_sums, pos, k_pos) -> Tensor:
        if self.relative_keys is None:
            return self._read_fused(q, k, v, sums, k_sums, k_pos)
        parts = []
        for rows, end in self._chunks(q.shape[2], k.shape[2]):
            given = (q[:, :, rows], k[:, :, :end], v[:, :, :end], sums[..., rows], k_sums[..., :end])
            given = (*given, pos[rows], k_pos[:, :end], self.relative_keys)
            parts.append(checkpoint(_score, *given, use_reentrant=False) if torch.is_grad_enabled() else _score(*given))
        return torch.cat(parts, 2)

    def _chunks(self, queries: int, keys: int) -> list[tuple[slice, int]]:
        """Chunks of queries, and how many keys each can see at most."""
        starts = range(0, queries, self.chunk)
        return [(slice(n, n + self.chunk), keys - queries + min(n + self.chunk, queries)) for n in starts]

    def _read_fused(self, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, k_sums: Tensor, k_pos: Tensor) -> Tensor:
        """Fused attention with the running sums c of queries [B, H, T] and keys [B, H, S] in additional columns of the
        heads."""
        dim, device = q.shape[3], q.device
        dtype = attention_dtype(q)
        k_sums = (k_sums - sums[..., -1:].detach()).masked_fill((k_pos == NEVER).unsqueeze(1), UNSEEN)
        q = torch.cat([q.to(dtype), _query_columns(sums * dim**0.5, dtype)], 3)
        k = torch.cat([k.to(dtype), _key_columns(-k_sums * dim**0.5, dtype)], 3)
        v = F.pad(v.to(dtype), (0, EXTRA))
        if q.shape[2] == k.shape[2]:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=dim**-0.5)
            return y[..., :dim]
        parts = []
        for rows, end in self._chunks(q.shape[2], k.shape[2]):
            part = q[:, :, rows]
            seen = torch.ones(part.shape[2], end, dtype=torch.bool, device=device).tril(end - part.shape[2])
            mask = None if part.shape[2] == 1 else seen
            y = F.scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=dim**-0.5)
            parts.append(y[..., :dim])
        return torch.cat(parts, 2)


def attention_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which scores are computed: autocast's where it is on."""
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q.dtype


EXTRA = 8
"""Number of columns added to every head: fused kernels need a head dim that is a multiple of eight."""
DIGITS = 3
"""How many of them hold a memory's bias: the sum of three bfloat16 numbers has the precision of one float32."""
UNSEEN = 1e30
"""Running sum of an empty slot: its bias, the negative of this, gives it a weight of zero."""


def _query_columns(own: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns [B, H, T, EXTRA] beside the queries: ones, which read the keys' bias, and the query's own bias [B, H, T].

    Softmax does not depend on a query's own bias, so its value here is zero. It is there for its gradient: mathematically that
    is zero as well, but its rounding errors cancel those in the gradients of the keys' biases, in the long sum that a gate
    receives.
    """
    ones, zero_with_gradient = own.new_ones(*own.shape, DIGITS), own - own.detach()
    columns = torch.cat([ones, zero_with_gradient.unsqueeze(-1)], -1)
    return F.pad(columns, (0, EXTRA - DIGITS - 1)).to(dtype)


def _key_columns(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns [B, H, S, EXTRA] beside the keys: the bias [B, H, S] as a sum of numbers of `dtype`, and a one."""
    first, *rest = split_digits(bias.detach().clamp_min(torch.finfo(dtype).min), dtype, DIGITS)
    first = first + (bias - bias.detach()).to(dtype)  # adds zero, and lets the gradient through to the bias
    columns = torch.stack([first, *rest, torch.ones_like(first)], -1)
    return F.pad(columns, (0, EXTRA - DIGITS - 1))


def _score(q, k, v, sums, k_sums, pos, k_pos, relative_keys) -> Tensor:
    age = pos.unsqueeze(1) - k_pos[:, None, None, :]  # [B, 1, T, S]
    bias = (sums.unsqueeze(3) - k_sums.unsqueeze(2)).to(q.dtype) + scaled_relative_scores(q, age, relative_keys)
    seen = (age >= 0) & (k_pos != NEVER)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf))
