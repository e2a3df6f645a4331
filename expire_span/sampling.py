"""How the next token is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expire_span.checks import Count, Seed, ShareAboveZero, Temperature, check_fields
from expire_span.field_docs import documented

COLDEST = 1e-30
"""Smallest number by which logits are divided: with a smaller temperature the quotients would be infinite."""


@documented
@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: Temperature = 1.0
    """Below 1 sharpens the distribution; 0 takes the likeliest token."""
    top_k: Count | None = None
    """Draw from the k likeliest tokens only."""
    top_p: ShareAboveZero | None = None
    """Draw from the smallest set of tokens that holds this share of the probability."""
    seed: Seed = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        check_fields(self, finite=False)


def narrow(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] of the next token after temperature, top_k and top_p."""
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits if sampling.temperature == 1 else logits / max(sampling.temperature, COLDEST)
    if sampling.top_k is None and sampling.top_p is None:
        return logits.softmax(-1)
    ordered, order = logits.sort(-1, descending=True)
    share = ordered.softmax(-1)
    if sampling.top_k is not None:
        share[..., sampling.top_k :] = 0
    if sampling.top_p is not None:
        share.masked_fill_((share.cumsum(-1) - share) / share.sum(-1, keepdim=True) >= sampling.top_p, 0)
    share = torch.zeros_like(share).scatter(-1, order, share)
    return share / share.sum(-1, keepdim=True)


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token for each row of logits [B, V], on their device and without waiting for it: [B].

    The token for which probability / (exponential random number) is largest is a sample from the probabilities.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = narrow(logits, sampling)
    return (chances / torch.empty_like(chances).exponential_(generator=generator)).argmax(-1)


def draw_rows(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator]) -> Tensor:
    """One token for each row of logits [B, V], each with settings and random numbers of its own: [B].

    A row gets the token that `draw` would give it alone, whatever its neighbours are.
    """
    tokens = logits.argmax(-1)
    alike: dict[Sampling, list[int]] = {}
    for row, sampling in enumerate(samplings):
        if sampling.temperature > 0:
            alike.setdefault(replace(sampling, seed=0), []).append(row)
    for sampling, rows in alike.items():
        chances = narrow(logits[rows], sampling)
        noise = torch.empty_like(chances)
        for row, part in zip(rows, noise):
            part.exponential_(generator=generators[row])
        tokens[rows] = (chances / noise).argmax(-1)
    return tokens
