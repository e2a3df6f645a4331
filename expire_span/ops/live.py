"""Counts of living memories in closed form, without a loop over pairs of queries and memories.

Memory i is alive for query t while `age < span + ramp`, and on the ramp while `span < age < span + ramp`. For queries at
consecutive positions first..last these are ranges of whole ages, so counts and sums over pairs need O(S) work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rule import lifetime


def _age_limits(span: Tensor, k_pos: Tensor, first: int, last: int, youngest: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest age of each memory among the queries first..last; `youngest` is the smallest age that counts."""
    low = (first - k_pos).clamp_min(youngest).to(span.dtype)
    high = (last - k_pos).to(span.dtype)
    return low, high


def live_queries(span: Tensor, k_pos: Tensor, first: int, last: int, *, ramp: float, include_self: bool) -> Tensor:
    """For how many of the queries first..last each memory is alive. span, k_pos [.., S] -> [.., S]."""
    low, high = _age_limits(span, k_pos, first, last, 0 if include_self else 1)
    oldest = lifetime(span, ramp) - 1
    return (torch.minimum(oldest, high) - low + 1).clamp_min(0)


def ramp_loss(span: Tensor, k_pos: Tensor, first: int, last: int, *, ramp: float) -> Tensor:
    """Sum of `(span - age) / ramp` over the pairs on the ramp, for queries first..last; gradient to span. [.., S] -> [..].

    This is the released code's loss. A memory contributes only while it is on its ramp, so the gradient of its span is 1/ramp
    for every query that sees it there.
    """
    low, high = _age_limits(span, k_pos, first, last, 1)
    youngest = torch.maximum(torch.floor(span.detach()) + 1, low)
    oldest = torch.minimum(lifetime(span, ramp) - 1, high)
    count = (oldest - youngest + 1).clamp_min(0)
    return (count * (span - (youngest + oldest) / 2)).sum(-1, dtype=torch.float64).to(span.dtype) / ramp
