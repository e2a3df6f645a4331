"""Which memories of a context are needed later, as the base model itself shows: the largest attention weight that each memory
gets while the model repeats the context and answers the questions in it.

A memory that is asked for once, long after it was written, gets next to nothing in a mean over later tokens, and gradients of
distillation reach only memories that are just expiring. While the whole context is repeated, everything that it told is
read again, so no question has to be known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

QUERIES = 256
"""Number of queries whose attention is computed at a time."""
LEAST = 1e-6
"""Smallest weight that is told from none."""


@dataclass(frozen=True)
class Reading:
    """A context, and what is read behind it."""

    ids: Tensor
    """Tokens of the context [1, n]."""
    weights: Tensor
    """By which the attention of each of its queries counts [1, n]."""
    asks: Tensor
    """Which of its queries answer questions about what stands before [n]."""
    again: Sequence[Tensor] = ()
    """What is read behind the context, one after the other: each a piece of it that is repeated [m]."""


def needed_weights(query: Tensor, key: Tensor, scale: float, asks: Tensor, apart: int = 1) -> Tensor:
    """The largest attention weight that each memory of a context gets from what is read behind it, and from its own queries
    that answer; q [B, Hq, T, D], k [B, Hkv, T, D], asks [n] with T >= n -> [B, Hkv, n].

    From the context's own answers only memories before the first of them get any: an answer also attends to its own beginning.
    apart: if nothing is read behind the context, all of its queries count that come at least so many tokens after a memory.
    """
    count = len(asks)
    if query.shape[2] == count:
        found = largest_weights(query, key, scale, torch.arange(count, device=key.device), count, apart)
    else:
        found = largest_weights(query, key, scale, torch.arange(count, query.shape[2], device=key.device), count)
    own = asks.nonzero().flatten()
    first = int(own[0]) if len(own) else 0
    if first:
        told = largest_weights(query, key, scale, own, first)
        found[..., :first] = torch.maximum(found[..., :first], told)
    return found


def largest_weights(query: Tensor, key: Tensor, scale: float, rows: Tensor, count: int, apart: int = 0) -> Tensor:
    """The largest attention weight that each of the first `count` keys gets from any of the queries `rows` (rising indices) of
    any head of its group, at least `apart` tokens later; q [B, Hq, T, D], k [B, Hkv, T, D] -> [B, Hkv, count]."""
    heads = key.shape[1]
    found = torch.zeros(len(key), heads, count, device=key.device)
    for part in rows.split(QUERIES) if len(rows) else ():
        end = int(part[-1]) + 1
        scores = query[:, :, part].unflatten(1, (heads, -1)).float() @ key[:, :, None, :end].float().mT * scale
        age = part.unsqueeze(1) - torch.arange(end, device=key.device)
        weights = scores.masked_fill_(age < 0, -torch.inf).softmax(-1)
        weights = weights.masked_fill_(age < apart, 0) if apart else weights
        seen = min(end, count)
        found[..., :seen] = torch.maximum(found[..., :seen], weights[..., :seen].amax((2, 3)))
    return found


def pieces_of(ids: Tensor, most: int) -> list[Tensor]:
    """Tokens [n] in as few pieces of about equal length as have at most `most` tokens each; none if that is below 1."""
    if most < 1 or not len(ids):
        return []
    pieces = -(-len(ids) // most)
    return list(ids.split(-(-len(ids) // pieces)))
