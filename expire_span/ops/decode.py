"""A few queries without gradient over a compacted store, in plain PyTorch on any device.

Nearly all memories of such a store are alive, so that one dense pass is faster than building live lists.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .reference import ages, in_one_document, soft_capped, without_unseen
from .rule import fade


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    documents: tuple[Tensor, Tensor] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Normalised inputs: span, k_pos [B, 1 or Hkv, S], q_pos [B, 1, T] with few T, documents [B, T] and [B, S]; see
    `expire_attention`."""
    age = ages(q_pos, k_pos, causal=causal)
    mask = fade(span.unsqueeze(-2) - age.to(span.dtype), ramp)  # [B, P, T, S]
    mask.masked_fill_(age < 0 if include_self else age <= 0, 0)
    if documents is not None:
        mask = torch.where(in_one_document(*documents), mask, 0)
    extra = (scale, softcap, sinks)
    if q.device.type != "cpu" or torch.compiler.is_compiling():
        return _attend(q, *without_unseen(k, v, mask), mask, *extra)
    # On the CPU, checking the output for NaN costs less than cleaning all memories first, which is needed only if one holds NaN
    # or infinity.
    y = _attend(q, k, v, mask, *extra)
    return y if math.isfinite(y.sum()) else _attend(q, *without_unseen(k, v, mask), mask, *extra)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    work = torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(1, (k.shape[1], -1)).to(work) * scale  # [B, Hkv, G, T, D]
    mask = mask.to(work).unsqueeze(2)  # [B, P, 1, T, S]
    scores = (grouped.flatten(2, 3) @ k.to(work).mT).unflatten(2, grouped.shape[2:4])
    scores = soft_capped(scores, softcap) + mask.log()
    if sinks is None:
        weight = torch.softmax(scores, -1).masked_fill(mask.amax(-1, keepdim=True) == 0, 0)
    else:
        weight, _ = softmax_with_sinks(scores, sinks.to(work).view(1, k.shape[1], -1, 1, 1))
    y = weight.flatten(2, 3) @ v.to(work)
    return y.unflatten(2, grouped.shape[2:4]).flatten(1, 2).to(q.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the last dimension of scores [.., n] and one more logit of each row: their weights, [.., n] and [.., 1]."""
    weight = torch.softmax(torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1), -1)
    return weight[..., :-1], weight[..., -1:]
