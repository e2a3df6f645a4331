"""A few queries without gradient over a compacted store, in plain PyTorch: one pass, no lists. Any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import ages, expiry_mask


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
) -> Tensor:
    """Normalised inputs: span, k_pos [B, 1 or Hkv, S], q_pos [B, 1, T] with few T; see `expire_attention`."""
    kv_heads = k.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    age = ages(q_pos, k_pos, causal=causal)
    mask = expiry_mask(span, age, ramp=ramp, include_self=include_self).to(work).unsqueeze(2)  # [B, P, 1, T, S]
    grouped = q.unflatten(1, (kv_heads, -1)).to(work) * scale  # [B, Hkv, G, T, D]
    scores = (grouped.flatten(2, 3) @ k.to(work).mT).unflatten(2, grouped.shape[2:4])
    weight = torch.softmax(scores + mask.log(), -1).masked_fill(mask.amax(-1, keepdim=True) == 0, 0)
    y = weight.flatten(2, 3) @ v.to(work)
    return y.unflatten(2, grouped.shape[2:4]).flatten(1, 2).to(q.dtype)
