"""Linear attention: y_t = phi(q_t) S_t / phi(q_t) z_t with S_t = sum phi(k_i) v_i and z_t = sum phi(k_i), phi = elu + 1.

The state is the two sums, in float32 or better. Training works chunk by chunk: inside a chunk the quadratic form, between
chunks the running sums; no loop over time. Without positions the order within the past would be invisible, so where the
model has rotary ones, counted from a row's first token, they turn the features of S_t; those of z_t stay positive.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.mixer_configs import LinearConfig, PerformerConfig

from .attention import AttentionMixer, bytes_of, empty_rows, share_heads
from .mixer import MixerAux, MixerOutput
from .rotary import rotate


def running_sums(q: Tensor, k: Tensor, v: Tensor, before: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """q_t S_t [B, H, T, D] with S_t = before + sum k_i v_i over i <= t, and the last S. q, k [B, H, T, M], v [B, H, T, D]."""
    count = q.shape[2]
    short = -count % chunk if count > chunk else 0
    size = min(chunk, count)
    q, k, v = (F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, size)) for x in (q, k, v))  # [B, H, N, chunk, .]
    each = k.transpose(-1, -2) @ v  # [B, H, N, M, D]
    sums = torch.cat([before.to(each.dtype).unsqueeze(2), each], 2).cumsum(2)
    inside = (q @ k.transpose(-1, -2)).tril() @ v
    return (inside + q @ sums[:, :, :-1]).flatten(2, 3)[:, :, :count], sums[:, :, -1].detach()


def running_attention(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, chunk: int, turned: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Non-negative features q, k [B, H, T, M] and values v [B, H, T, D] -> y [B, H, T, D] and the sums [B, H, M, D + 1] after.

    turned: q and k as the weighted sum of values sees them, where that differs from what its normaliser sees.
    """
    ones = torch.ones_like(v[..., :1])  # the last column sums phi(k) itself
    if turned is None:
        both, after = running_sums(q, k, torch.cat([v, ones], -1), before, chunk)
        top, bottom = both[..., :-1], both[..., -1:]
    else:
        top, above = running_sums(*turned, v, before[..., :-1], chunk)
        bottom, below = running_sums(q, k, ones, before[..., -1:], chunk)
        after = torch.cat([above, below], -1)
    return top / bottom.clamp_min(torch.finfo(bottom.dtype).tiny), after


class Linear(AttentionMixer):
    """State {"sums": [B, Hkv, M, D + 1], "seen": tokens of each row [B]}."""

    records_alone = True

    @property
    def num_features(self) -> int:
        return self.config.head_dim

    def features(self, x: Tensor, *, of_query: bool) -> Tensor:
        """phi, [B, H, T, D] -> [B, H, T, M]."""
        return F.elu(x) + 1

    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Any = None) -> dict[str, Any]:
        dtype = torch.promote_types(self.query.weight.dtype, torch.float32)
        shape = (batch, self.config.num_kv_heads, self.num_features, self.config.head_dim + 1)
        device = self.query.weight.device
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return {"sums": torch.zeros(shape, dtype=dtype, device=device), "seen": seen}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def turn_features(self, q: Tensor, k: Tensor, pos: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features at pos [B, T], or None if these carry their positions already or have none."""
        if self.config.positions != "rotary":
            return None
        angles = self._angles(pos.unsqueeze(1), q.dtype)
        return rotate(q, angles), rotate(k, angles)

    def _queries_and_keys(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Heads of x that the features read, at pos [B, T] from each row's first token: not used here."""
        q, k = self._split(self.query(x)), self._split(self.key(x))
        if self.config.qk_norm:
            q, k = (F.rms_norm(part, (self.config.head_dim,)) for part in (q, k))
        return q, k

    def forward(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        m, count = self.config.mixer, x.shape[1]
        assert isinstance(m, (LinearConfig, PerformerConfig))
        pos = state["seen"].unsqueeze(1) + torch.arange(count, device=x.device)
        q, k = self._queries_and_keys(x, pos)
        v = self._split(self.value(x))
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = (part.to(state["sums"].dtype) for part in (q, k, v))
            heads = q.shape[1]
            q, k = self.features(q, of_query=True), self.features(k, of_query=False)
            k, v, before = (share_heads(part, heads) for part in (k, v, state["sums"]))
            y, sums = running_attention(q, k, v, before, m.chunk, self.turn_features(q, k, pos))
        after = {"sums": sums[:, :: heads // self.config.num_kv_heads].clone(), "seen": state["seen"] + count}
        aux = MixerAux(live=torch.ones((), device=x.device), bytes_held=bytes_of(after))
        return MixerOutput(self._finish(y.to(x.dtype)), after, aux)
