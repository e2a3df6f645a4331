"""Linear attention: y_t = phi(q_t) S_t / phi(q_t) z_t with S_t = sum phi(k_i) v_i and z_t = sum phi(k_i), phi = elu + 1.

The state is the two sums, in float32 or better. Training works in chunks, without a loop over time: inside a chunk it uses the
quadratic form, between chunks the running sums. Under autocast to bfloat16, products are in bfloat16 and sums over time are
not. The sums alone do not show the order of tokens, so where the model has rotary positions, counted from a row's first token,
the features in S_t are rotated; those in z_t are not, so that they stay positive.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.attention import AttentionMixer, empty_rows, share_heads
from expire_span.models.kit.precision import storage_dtype
from expire_span.models.kit.rotary import rotate
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.linear import LinearConfig


def running_attention(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, chunk: int, turned: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Non-negative features q, k [B, H, T, M] and values v [B, H, T, D] -> y [B, H, T, D] and the sums [B, H, M, D + 1] after.

    before: the sums [B, H, M, D + 1] before the first token; the last column is the sum of phi(k), the normaliser's. Products
    are in the dtype of their factors, sums over time in that of `before`. turned: rotated q and k for the sum of values, while
    the normaliser uses q and k; None uses q and k for both.
    """
    count, size, dtype = q.shape[2], min(chunk, q.shape[2]), before.dtype
    short = -count % size
    parts = [F.pad(x, (0, 0, 0, short)).unflatten(2, (-1, size)) for x in (q, k, v, *(turned or ()))]
    q, k, v = parts[:3]  # [B, H, N, size, .]
    turned_q, turned_k = parts[3:] if turned is not None else (q, k)
    scores = (turned_q @ turned_k.transpose(-1, -2)).tril()
    sums = _add_up(before[..., :-1], turned_k.transpose(-1, -2) @ v)  # [B, H, N + 1, M, D]
    top = (scores @ v).to(dtype) + turned_q @ sums[:, :, :-1].to(q.dtype)
    if turned is not None:
        scores = (q @ k.transpose(-1, -2)).tril()
    weights = _add_up(before[..., -1], k.sum(-2, dtype=dtype))  # [B, H, N + 1, M]
    bottom = scores.sum(-1, dtype=dtype) + (q * weights[:, :, :-1].unsqueeze(-2)).sum(-1)
    y = top / bottom.clamp_min(torch.finfo(dtype).tiny).unsqueeze(-1)
    after = torch.cat([sums[:, :, -1], weights[:, :, -1].unsqueeze(-1)], -1)
    return y.flatten(2, 3)[:, :, :count], after.detach()


def _add_up(before: Tensor, each: Tensor) -> Tensor:
    """Running sums before each chunk and after the last, [B, H, N + 1, ..], from `before` [B, H, ..] and each chunk's sum."""
    return torch.cat([before.unsqueeze(2), each.to(before.dtype)], 2).cumsum(2)


class Linear(AttentionMixer):
    """State {"sums": [B, Hkv, M, D + 1], "seen": tokens of each row [B]}."""

    settings_class: ClassVar[type] = LinearConfig
    fixed_state = True
    recordable_alone = True

    @property
    def num_features(self) -> int:
        return self.shape.head_dim

    def features(self, x: Tensor, *, of_query: bool) -> Tensor:
        """phi, [B, H, T, D] -> [B, H, T, M]."""
        return F.elu(x) + 1

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        dtype = torch.promote_types(self.query.weight.dtype, torch.float32)
        shape = (batch, self.shape.num_kv_heads, self.num_features, self.shape.head_dim + 1)
        device = self.query.weight.device
        seen = torch.zeros(batch, dtype=torch.int64, device=device)
        return {"sums": torch.zeros(shape, dtype=dtype, device=device), "seen": seen}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def turn_features(self, q: Tensor, k: Tensor, pos: Tensor) -> tuple[Tensor, Tensor] | None:
        """Features rotated to pos [B, T]; None where the model has no rotary positions, or where they act before the
        features."""
        if self.shape.positions != "rotary":
            return None
        angles = self.angles(pos.unsqueeze(1), q.dtype)
        return rotate(q, angles), rotate(k, angles)

    def _queries_and_keys(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [B, H, T, D] from which features are computed. pos [B, T] is for subclasses that rotate them
        here."""
        q, k = self.split_heads(self.query(x)), self.split_heads(self.key(x))
        if self.shape.qk_norm:
            q, k = (F.rms_norm(part, (self.shape.head_dim,)) for part in (q, k))
        return q, k

    def _product_dtype(self, sums: Tensor) -> torch.dtype:
        """bfloat16 under autocast to bfloat16, else that of the sums: float16 cannot hold the sums of a long stream."""
        dtype = storage_dtype(sums)
        return dtype if dtype == torch.bfloat16 else sums.dtype

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        m, count = self.settings, x.shape[1]
        pos = state["seen"].unsqueeze(1) + torch.arange(count, device=x.device)
        q, k = self._queries_and_keys(x, pos)
        v = self.values(x)
        dtype = self._product_dtype(state["sums"])
        with torch.autocast(x.device.type, enabled=False):
            q, k = (part.to(state["sums"].dtype) for part in (q, k))
            heads = q.shape[1]
            q, k = self.features(q, of_query=True), self.features(k, of_query=False)
            k, v, before = (share_heads(part, heads) for part in (k, v, state["sums"]))
            turned = self.turn_features(q, k, pos)
            q, k, v = (part.to(dtype) for part in (q, k, v))
            turned = None if turned is None else (turned[0].to(dtype), turned[1].to(dtype))
            y, sums = running_attention(q, k, v, before, m.chunk, turned)
        after = {"sums": sums[:, :: heads // self.shape.num_kv_heads].clone(), "seen": state["seen"] + count}
        aux = MixerAux(live=torch.ones((), device=x.device), bytes_held=bytes_of(after))
        return MixerOutput(self.join_heads(y.to(x.dtype), x), after, aux)
