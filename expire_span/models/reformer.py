"""Reformer: queries serve as keys; a hash sends similar ones to the same bucket, and a query reads its bucket's last members.

    bucket(x) = argmax [x W; -x W],  key = query / |query|

Several rounds with different W are merged by their log-sum-exp. A token reads itself only where its bucket has nothing else,
as in the original.

With `selection="recent"` a query reads the last w members of its bucket, and training and streaming are one function. With
`selection="chunks"`, the original's, training sorts the block by bucket and reads the own and the previous chunk of w
entries: how far back a query sees then depends on where later tokens of other buckets push the chunks' borders. Evaluation
and streaming use the last w members in either case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.config import DecoderConfig
from expire_span.mixer_configs import ReformerConfig

from .attention import AttentionMixer, bytes_of, empty_rows, relative_scores, share_heads
from .grouped import empty_slots, grouped_attention
from .mixer import MixerAux, MixerOutput

ALONE = -1e5
"""Score of a token with itself: counts only where there is nothing else."""


def attend_with_weight(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, age: Tensor, relative_keys: Tensor | None
) -> Tensor:
    """Attention that avoids the token itself; y [N, H, T, D] with the log-sum-exp of its scores in one more column."""
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * q.shape[-1] ** -0.5
    if relative_keys is not None:
        scores = scores + relative_scores(q, relative_keys, age)
    scores = scores.masked_fill(age == 0, ALONE).masked_fill(~seen, -torch.inf)
    y = scores.softmax(-1).to(v.dtype) @ v
    return torch.cat([y.to(scores.dtype), scores.logsumexp(-1, keepdim=True)], -1)


class Reformer(AttentionMixer):
    """State {"slots": for every round and head, "position"}."""

    separate_keys = False
    hashes: Tensor

    def __init__(self, config: DecoderConfig, layer: int = 0, relative_keys: nn.Parameter | None = None) -> None:
        super().__init__(config, layer, relative_keys)
        m = config.mixer
        assert isinstance(m, ReformerConfig)
        self.rule = m
        generator = torch.Generator().manual_seed(m.seed * 1000 + layer)
        shape = (m.rounds, config.heads, config.head_dim, max(m.buckets // 2, 1))
        self.register_buffer("hashes", torch.randn(shape, generator=generator))

    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Any = None) -> dict[str, Any]:
        m, like = self.rule, self.query.weight.detach()
        slots = empty_slots(batch, m.rounds * self.config.heads, m.buckets, m.members, self.config.head_dim, like)
        return {"slots": slots, "position": 0}

    def reset_rows(self, state: dict[str, Any], fresh: Tensor, empty: Tensor | None = None) -> dict[str, Any]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def forward(self, x: Tensor, state: dict[str, Any]) -> MixerOutput:
        start, rounds = state["position"], self.rule.rounds
        pos = torch.arange(start, start + x.shape[1], device=x.device)
        plain = self._split(self.query(x))  # [B, H, T, D]
        unit = F.rms_norm(plain, (self.config.head_dim,))  # length sqrt(D): the scale of the scores divides by it
        q, k = self._turn(unit if self.config.qk_norm else plain, pos), self._turn(unit, pos)
        v = share_heads(self._split(self.value(x)), plain.shape[1])
        q, k, v = (part.repeat(1, rounds, 1, 1) for part in (q, k, v))
        options: dict[str, Any] = {"members": self.rule.members, "relative_keys": self.relative_keys}
        options |= {"chunks": self.training and self.rule.selection == "chunks", "core": attend_with_weight}
        both, slots, live = grouped_attention(q, k, v, pos, self._buckets(plain), state["slots"], **options)
        both = both.unflatten(1, (rounds, -1))  # [B, rounds, H, T, D + 1]
        share = both[..., -1:].softmax(1)
        y = (both[..., :-1] * share).sum(1).to(x.dtype)
        after = {"slots": slots, "position": start + x.shape[1]}
        return MixerOutput(self._finish(y), after, MixerAux(live=live.float().mean(), bytes_held=bytes_of(after)))

    def _buckets(self, x: Tensor) -> Tensor:
        """[B, H, T, D] -> [B, rounds * H, T]."""
        turned = torch.einsum("bhtd,rhdn->brhtn", x.detach(), self.hashes.to(x.dtype))
        both = turned if self.rule.buckets == 1 else torch.cat([turned, -turned], -1)
        return both.argmax(-1).flatten(1, 2)
