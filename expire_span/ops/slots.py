"""Decoding over slots (store/slots.py): one query per row and head, in plain PyTorch on any device.

`attend_slots` is the definition. The kernel of `ops/triton/slots.py` fuses it with the rest of the step: it also normalises and
rotates the new query and key, predicts the span and appends the memory.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .decode import softmax_with_sinks
from .fused import log_of_mask
from .reference import soft_capped
from .rule import fade

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


class SpanForm(NamedTuple):
    """Parameters from which a decoding step computes spans, one entry per key/value head: low + room sigmoid(weight . h +
    bias)."""

    weight: Tensor
    """[Hkv, C] in float32; zero where a head gives every token the same span."""
    bias: Tensor
    """[Hkv]; plus or minus infinity where the sigmoid must be exactly 1 or 0."""
    low: Tensor
    room: Tensor

    @classmethod
    def constant(cls, span: Tensor, dim: int) -> SpanForm:
        """The same span for every token: `span` [Hkv]."""
        return cls(span.new_zeros(len(span), dim), torch.zeros_like(span), span, torch.zeros_like(span))


def attend_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    remaining: Tensor,
    *,
    ramp: float,
    scale: float,
    age: Tensor | None = None,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """y [B, Hq, D] for queries q [B, Hq, D] over slots k, v [B, Hkv, W, D].

    remaining [B, Hkv, W]: span - age of each memory, minus infinity for empty slots.
    softcap, sinks: those of `expire_attention`.
    age [B, Hkv, W]: steps since each memory was written; needed only with relative_keys [M, D].
    """
    heads = k.shape[1]
    q = q.unflatten(1, (heads, -1))  # [B, Hkv, G, D]: the heads of a group are queries of their key/value head
    mask = fade(remaining, ramp)
    plain = relative_keys is None and normalizer_eps == 0 and softcap == 0 and sinks is None
    if plain and q.dtype == mask.dtype:
        log = log_of_mask(mask) if mask.device.type == "cpu" else mask.log_()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=log.unsqueeze(2), scale=scale)
        return y.flatten(1, 2)
    work = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(work) @ k.to(work).mT  # [B, Hkv, G, W]
    if relative_keys is not None:
        assert age is not None
        scores = scores + _relative(q.to(work), relative_keys.to(work), age)
    mask = mask.to(work).unsqueeze(2)
    scores = soft_capped(scores * scale, softcap).masked_fill(mask == 0, -torch.inf)
    if sinks is not None:
        weight, _ = softmax_with_sinks(scores + mask.log(), sinks.to(work).view(1, heads, -1, 1))
        return (weight @ v.to(work)).flatten(1, 2).to(q.dtype)
    weight = torch.exp(scores - scores.amax(-1, keepdim=True).clamp_min(torch.finfo(work).min))
    faded = mask * weight
    total = faded.sum(-1, keepdim=True) + normalizer_eps * weight.sum(-1, keepdim=True)
    return (faded / torch.where(total > 0, total, 1) @ v.to(work)).flatten(1, 2).to(q.dtype)


def _relative(q: Tensor, relative_keys: Tensor, age: Tensor) -> Tensor:
    """q . relative_keys[age - 1] for ages 1..M, else 0. q [B, Hkv, G, D], age [B, Hkv, W] -> [B, Hkv, G, W]."""
    table, count = q @ relative_keys.T, relative_keys.shape[0]
    index = (age.long() - 1).clamp(0, count - 1).unsqueeze(2).expand(*table.shape[:3], -1)
    near = ((age >= 1) & (age <= count)).unsqueeze(2)
    return torch.where(near, table.gather(-1, index), 0)


def slot_kernel_serves(impl: str, like: Tensor) -> bool:
    """Whether the fused kernel of ops/triton/slots.py runs for a layer with this `impl` and these weights. Any head dim will
    do."""
    return (
        like.device.type == "cuda" and like.dtype in KERNEL_DTYPES and TRITON_INSTALLED and impl in ("auto", "triton")
    )
