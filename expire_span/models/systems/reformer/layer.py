"""Reformer: queries serve as keys; a hash sends similar ones to the same bucket, and a query reads its bucket's last members.

    bucket(x) = argmax [x W; -x W],  key = query / |query|

Several rounds with different W are merged by their log-sum-exp. A token reads itself only where its bucket has nothing else,
as in the original.

With `selection="recent"` a query reads the last w members of its bucket, and training and streaming compute the same function.
With `selection="chunks"`, as in the original, training sorts the block by bucket, cuts it into chunks of w entries, and a query
reads its own chunk and the one before: how far back it sees then depends on where later tokens shift the borders of the chunks.
Evaluation and streaming use the last w members in either case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.attention import AttentionMixer, empty_rows, scaled_relative_scores, share_heads
from expire_span.models.kit.grouped import empty_slots, grouped_attention
from expire_span.models.mixer import Keep, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.reformer import ReformerConfig

ALONE = -1e5
"""Score of a token with itself: so low that it has weight only where the query reads nothing else."""


def attend_with_weight(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, age: Tensor, relative_keys: Tensor | None
) -> Tensor:
    """Attention that avoids the token itself, called like `attend`; y [N, H, T, D + 1] with the log-sum-exp of a query's scores
    in the last column."""
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if relative_keys is not None:
        scores = scores + scaled_relative_scores(q, age, relative_keys)
    scores = scores.masked_fill(age == 0, ALONE).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).to(v.dtype) @ v
    return torch.cat([y.to(scores.dtype), scores.logsumexp(-1, keepdim=True)], -1)


class Reformer(AttentionMixer):
    """State {"slots": the last members of every bucket, for each round and head, "position": of the next token}."""

    settings_class = ReformerConfig
    settings: ReformerConfig
    separate_keys = False
    hashes: Tensor

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        m = self.settings
        generator = torch.Generator().manual_seed(m.seed * 1000 + self.shape.depth)
        shape = (m.rounds, self.shape.heads, self.shape.head_dim, max(m.buckets // 2, 1))
        self.register_buffer("hashes", torch.randn(shape, generator=generator))

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Any]:
        m, like = self.settings, self.query.weight.detach()
        slots = empty_slots(batch, m.rounds * self.shape.heads, m.buckets, m.members, self.shape.head_dim, like)
        return {"slots": slots, "position": 0}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def mix(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, rounds = state["position"], self.settings.rounds
        pos = torch.arange(start, start + x.shape[1], device=x.device)
        plain = self.split_heads(self.query(x))  # [B, H, T, D]
        unit = F.rms_norm(plain, (self.shape.head_dim,))  # of length sqrt(D), by which the scale of the scores divides
        q, k = self.rotate(unit if self.shape.qk_norm else plain, pos), self.rotate(unit, pos)
        v = share_heads(self.values(x), plain.shape[1])
        q, k, v = (part.repeat(1, rounds, 1, 1) for part in (q, k, v))
        options: dict[str, Any] = {"members": self.settings.members, "relative_keys": self.relative_keys}
        options |= {"chunks": self.training and self.settings.selection == "chunks", "core": attend_with_weight}
        both, slots, live = grouped_attention(q, k, v, pos, self._buckets(plain), state["slots"], **options)
        both = both.unflatten(1, (rounds, -1))  # [B, rounds, H, T, D + 1]
        share = both[..., -1:].softmax(1)
        y = (both[..., :-1] * share).sum(1).to(x.dtype)
        after = {"slots": slots, "position": start + x.shape[1]}
        return MixerOutput(self.join_heads(y, x), after, MixerAux(live=live.float().mean(), bytes_held=bytes_of(after)))

    def _buckets(self, x: Tensor) -> Tensor:
        """The bucket of each token in each round: [B, H, T, D] -> [B, rounds * H, T]."""
        turned = torch.einsum("bhtd,rhdn->brhtn", x.detach(), self.hashes.to(x.dtype))
        both = turned if self.settings.buckets == 1 else torch.cat([turned, -turned], -1)
        return both.argmax(-1).flatten(1, 2)
