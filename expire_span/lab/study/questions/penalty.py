"""Ordinary attention with a penalty on its weights, and a cache that drops the memories that get little attention.

What can be penalised? Not the attention weights' L1 norm: the weights of a query are positive and sum to one, so their L1 norm
is one whatever the model does, and its gradient is zero. Three penalties that do something:

    entropy        -sum_i a_ti log a_ti          each query should read few memories
    columns        sum_i sqrt(sum_t a_ti)        few memories should be read by anybody, over all time
    unnormalised   sum_i exp(s_ti)               the weights before they are made to sum to one

The cache then drops memories by the attention that they have received so far. This uses the past only, as a stream must: at
step t it knows a_si for s <= t, and nothing of later questions. `hindsight` is the same rule with the attention that a memory
will receive from now on, which no stream can know; it shows how well attention would work if it were known in advance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.models.mixer import MixerAux, MixerOutput
from expire_span.models.systems.full.layer import Full

Penalty = Literal["none", "l1", "entropy", "columns", "unnormalised"]
SCORE_LIMIT = 30.0
"""Scores are clamped to this before exp, so that the unnormalised penalty cannot overflow."""


def l1_norm(weight: Tensor, scores: Tensor) -> Tensor:
    """Mean over queries of sum_i |a_ti|, which is always one. [B, H, T, T] -> [B]."""
    return weight.abs().sum(-1).mean((1, 2))


def entropy(weight: Tensor, scores: Tensor) -> Tensor:
    """Mean entropy of a query's attention, in nats. Weights are clamped from below, so that gradients at weight 0 stay
    finite."""
    return -(weight * weight.clamp_min(1e-30).log()).sum(-1).mean((1, 2))


def column_spread(weight: Tensor, scores: Tensor) -> Tensor:
    """Mean over memories of the square root of all attention that each gets, averaged over heads: small if few are read."""
    received = weight.mean(1).sum(-2)  # [B, T]
    return (received + 1e-6).sqrt().mean(-1)


def unnormalised_mass(weight: Tensor, scores: Tensor) -> Tensor:
    """Mean over queries of sum_i exp(s_ti) over what the query sees."""
    return scores.clamp_max(SCORE_LIMIT).exp().sum(-1).mean((1, 2))


PENALTIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": l1_norm,
    "entropy": entropy,
    "columns": column_spread,
    "unnormalised": unnormalised_mass,
}


@dataclass(frozen=True)
class Drop:
    """When a memory leaves the cache."""

    threshold: float = 0.0
    """A memory is dropped once its mean attention from the queries since it was written is below this."""
    grace: int = 4
    """Memories younger than this many steps are kept, since few queries could have read them."""
    keep: int | None = None
    """Instead of a threshold: keep the youngest `grace` memories and the `keep` others that got most attention."""
    hindsight: bool = False
    """Use the attention that memories will get later, which is impossible in a stream."""


class PenalisedAttention(Full):
    """Full attention that reports a penalty on its weights, and drops memories where `drop` is set.

    A memory is kept or dropped for all heads of a layer together, as with one span per layer; its attention is the maximum over
    heads.
    """

    def __init__(self, *shape: Any, penalty: Penalty = "none", **options: Any) -> None:
        super().__init__(*shape, **options)
        self.penalty = penalty
        self.drop: Drop | None = None

    def mix(self, x: Tensor, state: Any) -> MixerOutput:
        scores, weight, v = self.attention(x)
        held = torch.tensor((x.shape[1] + 1) / 2, device=x.device)
        if self.drop is not None:
            weight, held = drop_unread(scores, weight, self.drop)
        loss = None if self.penalty == "none" else PENALTIES[self.penalty](weight, scores)
        return MixerOutput(self.join_heads(weight @ v, x), state, MixerAux(loss, None, held))

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and weights [B, H, T, T] without dropping, and the values."""
        q, k, v, _ = self.project(x, 0)
        scores = q @ k.transpose(-1, -2) * self.shape.head_dim**-0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
        return scores, torch.softmax(scores, -1), v


def penalise(decoder: Decoder, penalty: Penalty) -> Decoder:
    """The same decoder of full attention, weight for weight, with penalised attention in every block."""
    for layer, block in enumerate(decoder.layers()):
        mixer = PenalisedAttention(**asdict(decoder.config.shape(layer)), penalty=penalty)
        mixer.load_state_dict(block.mixer.state_dict())
        block.mixer = mixer
    return decoder


def drop_unread(scores: Tensor, weight: Tensor, rule: Drop) -> tuple[Tensor, Tensor]:
    """Attention [B, H, T, T] when memories are dropped step by step, and the mean number held. weight: without dropping."""
    batch, _, count, _ = scores.shape
    future = weight.amax(1).flip(1).cumsum(1).flip(1) - weight.amax(1) if rule.hindsight else None
    held = torch.ones(batch, count, dtype=torch.bool, device=scores.device)  # memories not dropped so far
    received = scores.new_zeros(batch, count)
    place, rows, sizes = torch.arange(count, device=scores.device), [], []
    for t in range(count):
        row = torch.softmax(scores[:, :, t].masked_fill(~held.unsqueeze(1), -torch.inf), -1)  # [B, H, T]
        rows.append(row)
        sizes.append(held[:, : t + 1].sum(1))
        received = received + row.amax(1)
        worth = received / (t + 1 - place).clamp_min(1)
        if future is not None:
            worth = future[:, t]
        held = held & _stays(worth, t - place, held, rule)
    return torch.stack(rows, 2), torch.stack(sizes).float().mean()


def _stays(worth: Tensor, age: Tensor, held: Tensor, rule: Drop) -> Tensor:
    """Which memories [B, T] the rule keeps after a step; age [T], below zero for those not yet written."""
    young = age + 1 < rule.grace
    if rule.keep is None:
        return young | (worth >= rule.threshold)
    old = held & ~young
    worth = worth.masked_fill(~old, -torch.inf)
    best = worth.topk(min(rule.keep, worth.shape[1]), 1).indices
    chosen = torch.zeros_like(held).scatter(1, best, True)
    return young | (chosen & old)
