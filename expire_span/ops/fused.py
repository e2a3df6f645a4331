"""PyTorch's fused CPU attention over the live list of one chunk, and the gradient of spans, which that kernel does not compute.

The fused kernel keeps a block of scores in the processor's cache. It takes the mask as a term of the scores, log m, and returns
the logarithm of each query's normaliser, from which any weight can be recomputed: w = exp(score + log m - log total).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from . import rule
from .lists import LiveList

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Forward(NamedTuple):
    y: Tensor  # [N, K, Q, D]; zero for a query that sees no living memory
    log_total: Tensor  # [N, K, Q]


def log_of_mask(mask: Tensor) -> Tensor:
    """log m, with minus infinity where m is 0. log(0) is not evaluated: on x86 it takes forty times as long as other values."""
    tiny = torch.finfo(mask.dtype).tiny  # every other m is far larger, since it is 1 minus a rounded share
    return torch.threshold_(mask.clamp_min(tiny).log_(), 0.95 * math.log(tiny), -math.inf)


def log_mask(mask: Tensor, live: LiveList, group: int) -> Tensor | None:
    """log m of all entries [N, 1, G*C, n] from the mask [N, 1, 1, C, n - full]; None if the mask is 1 everywhere."""
    if mask.shape[-1] == 0:
        return None
    whole = F.pad(log_of_mask(mask[:, :, 0]), (live.full, 0))
    return whole if group == 1 else whole.repeat(1, 1, group, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, log_mask: Tensor | None, scale: float) -> Forward:
    """q [N, K, Q, D] over k, v [N, K, n, D] under log_mask [N, 1, Q, n]."""
    return Forward(*_forward(q, k, v, 0.0, False, attn_mask=log_mask, scale=scale))


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Forward, log_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    return _backward(dy, q, k, v, done.y, done.log_total, 0.0, False, attn_mask=log_mask, scale=scale)


def forward_whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Forward:
    """Causal attention in which nothing expires: q [N, K, G, T, D] over k, v [N, K, T, D]; y and log_total by [N, K, G, T]."""
    y, log_total = _forward(q.flatten(1, 2), *_by_query_head(q, k, v), 0.0, True, attn_mask=None, scale=scale)
    return Forward(y.view(q.shape), log_total.view(q.shape[:-1]))


def backward_whole(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Forward, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v of `forward_whole`, in their shapes."""
    dy, flat, y, log_total = (x.flatten(1, 2) for x in (dy, q, *done))
    dq, dk, dv = _backward(dy, flat, *_by_query_head(q, k, v), y, log_total, 0.0, True, attn_mask=None, scale=scale)
    dk, dv = (x.unflatten(1, q.shape[1:3]).sum(2) for x in (dk, dv))
    return dq.view(q.shape), dk, dv


def _by_query_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Keys and values [N, K*G, T, D], those of a group of query heads repeated."""
    return [x.repeat_interleave(q.shape[2], 1) if q.shape[2] > 1 else x for x in (k, v)]


def ramp_gradient(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Forward, mask: Tensor, scale: float
) -> Tensor | None:
    """The gradient of span / ramp, summed over heads and queries, [N, n].

    k, v [N, K, n, D] and mask [N, 1, 1, C, n] of the entries that have a mask. None where none of them is on its ramp.
    """
    width = mask.shape[-1]
    columns = rule.is_on_ramp(mask).any(3).flatten(0, 2).any(0).nonzero().squeeze(1)
    if not len(columns):
        return None
    begin, end = int(columns[0]), int(columns[-1]) + 1
    # If most columns between the first and the last are needed, views of all of them are cheaper than a copy.
    if 2 * len(columns) >= end - begin:
        columns = slice(begin, end)
    k, v = k[:, :, columns], v[:, :, columns]
    size = mask.shape[3]
    # Transposed copies: a CPU multiplies them four times as fast as strided views of the gathered memories.
    k, v = (x.mT.contiguous().flatten(0, 1) for x in (k, v))  # [N*K, D, r]
    weight = torch.bmm(q.flatten(0, 1), k).mul_(scale).sub_(done.log_total.flatten(0, 1).unsqueeze(-1)).exp_()
    # [N*K, Q, r]: weights without their mask, which is the derivative of w by m
    delta = (dy * done.y).sum(-1).flatten(0, 1).unsqueeze(-1)
    weight *= torch.bmm(dy.flatten(0, 1), v).sub_(delta)
    part = weight.view(len(q), -1, q.shape[2] // size, size, k.shape[2]).sum((1, 2))  # [N, C, r]
    found = part.new_zeros(len(q), width)
    found[:, columns] = rule.slope(part, mask[:, 0, 0, :, columns]).sum(1)
    return found
