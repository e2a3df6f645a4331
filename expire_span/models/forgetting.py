"""Forget-gate attention, as in the Forgetting Transformer: score(t, i) = q_t . k_i / sqrt(D) + sum of log f_j, i < j <= t.

f = sigmoid(w . x + b), one gate per head and step. Nothing is deleted: the state grows with the stream. The running sum is
kept in float64, so that differences of it stay exact on long streams. Queries are scored in chunks and scores are recomputed
in the backward pass, so that memory stays linear in the length.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expire_span.config import DecoderConfig
from expire_span.memory import NEVER, ExpiringMemory
from expire_span.mixer_configs import ForgettingConfig

from .attention import AttentionMixer, bytes_of, relative_scores, share_heads
from .full import FOREVER
from .mixer import MixerAux, MixerOutput


class Forgetting(AttentionMixer):
    """State {"memory": store of k, v and the running sum at birth, "total": running sum [B, Hq], "position"}."""

    def __init__(self, config: DecoderConfig, layer: int = 0, relative_keys: nn.Parameter | None = None) -> None:
        super().__init__(config, layer, relative_keys)
        assert isinstance(config.mixer, ForgettingConfig)
        self.chunk = config.mixer.chunk
        self.gate = nn.Linear(config.dim, config.heads)
        nn.init.constant_(self.gate.bias, math.log(config.mixer.initial_gate / (1 - config.mixer.initial_gate)))

    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Any = None) -> dict[str, Any]:
        device = self.query.weight.device
        total = torch.zeros(batch, self.config.heads, dtype=torch.float64, device=device)
        memory = ExpiringMemory.empty(batch, ramp=1, device=device)
        return {"memory": memory, "total": total, "position": 0, "cache": cache}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, empty: Tensor | None = None) -> dict[str, Any]:
        return {**state, "memory": state["memory"].forget_rows(fresh)}

    def forward(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, memory = state["position"], state["memory"]
        q, k, v, pos = self._project(x, start)
        sums = state["total"].unsqueeze(2) + self._log_gate(x).double().cumsum(2)  # [B, H, T]
        k_pos, k_sums, keys, values = pos.expand(len(x), -1), sums, k, v
        if len(memory):
            k_pos = torch.cat([memory.pos, k_pos], 1)
            k_sums = torch.cat([memory["sums"].transpose(1, 2), sums], 2)
            keys = torch.cat([memory["k"].transpose(1, 2).to(k.dtype), k], 2)
            values = torch.cat([memory["v"].transpose(1, 2).to(v.dtype), v], 2)
        y = self._read(q, share_heads(keys, q.shape[1]), share_heads(values, q.shape[1]), sums, k_sums, pos, k_pos)
        if state["cache"] != "none":
            span = torch.full((len(x), x.shape[1]), float(FOREVER), device=x.device)
            fields = {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "sums": sums.transpose(1, 2)}
            memory = memory.append(pos, span, **fields)
        after = {"memory": memory, "total": sums[:, :, -1].detach().clone(), "position": start + x.shape[1]}
        after["cache"] = state["cache"]
        live = (k_pos != NEVER).sum(1).float().mean() - (x.shape[1] - 1) / 2
        return MixerOutput(self._finish(y), after, MixerAux(live=live, bytes_held=bytes_of(after)))

    def _log_gate(self, x: Tensor) -> Tensor:
        """[B, T, C] -> [B, H, T], in float32 or better."""
        with torch.autocast(x.device.type, enabled=False):
            return F.logsigmoid(self.gate(x.to(self.gate.weight.dtype))).transpose(1, 2)

    def _read(self, q, k, v, sums, k_sums, pos, k_pos) -> Tensor:
        parts = []
        for first in range(0, q.shape[2], self.chunk):
            rows = slice(first, first + self.chunk)
            end = k.shape[2] - q.shape[2] + min(first + self.chunk, q.shape[2])  # later keys are unseen by this chunk
            given = (q[:, :, rows], k[:, :, :end], v[:, :, :end], sums[..., rows], k_sums[..., :end])
            given = (*given, pos[rows], k_pos[:, :end], self.relative_keys)
            parts.append(checkpoint(_score, *given, use_reentrant=False) if torch.is_grad_enabled() else _score(*given))
        return torch.cat(parts, 2)


def _score(q, k, v, sums, k_sums, pos, k_pos, relative_keys) -> Tensor:
    age = pos.unsqueeze(1) - k_pos[:, None, None, :]  # [B, 1, T, S]
    bias = (sums.unsqueeze(3) - k_sums.unsqueeze(2)).to(q.dtype)
    if relative_keys is not None:
        bias = bias + relative_scores(q, relative_keys, age)
    seen = (age >= 0) & (k_pos != NEVER)[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(~seen, -torch.inf))
