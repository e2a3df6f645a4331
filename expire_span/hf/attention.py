"""The attention function and the mask function that retrofitted layers run through.

Transformers looks both up by name. The name must be registered for masks too: an unregistered one silently drops padding. It
must not contain flash, sdpa or flex_attention, which transformers treats specially.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from expire_span.ops import expire_attention, spans_of_heads
from expire_span.ops.reference import ages
from expire_span.ops.rule import exact_span, fade

NAME = "expire_span"
KEPT = float(2**62)
"""Span of tokens that are always kept, longer than any stream. It is finite, so that the ordinary deletion rule applies."""


def is_kept(span: Tensor) -> Tensor:
    """Which spans are KEPT: those above half of it, since adding and subtracting a ramp may have rounded them."""
    return span > KEPT / 2


@dataclass(eq=False)
class LayerReading:
    """What the queries of one forward pass read in one layer. The hook before the layer makes it, the cache adds the positions
    of its memories, and the attention function uses it."""

    span: Tensor
    """Spans [B, Hkv, S] in tokens; padding has -ramp, which is dead at birth."""
    start: int
    """Position of the first query."""
    ramp: float
    impl: Any = "auto"
    k_pos: Tensor | None = None
    """Positions of the memories; None where there is no cache and they are those of the queries."""
    documents: Tensor | None = None
    """Ids [B, T] of packed documents, or None."""
    wants_weights: bool = False
    hidden: Tensor | None = None
    """The predictor's input, [B, T, C], which caches for learning store."""
    predictor: nn.Module | None = None
    slots: Any = None
    """The `SlotAttention` of the layer, where one token of each row is decoded over slots; else None."""


def register() -> None:
    """Register the names with transformers; safe to call again."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, keep_padding)


def keep_padding(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask function: returns the 2-D padding mask as it is. The operator handles causality, windows and lifetimes."""
    return attention_mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    expire_reading: LayerReading,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: query [B, Hq, T, D], key and value [B, Hkv, S, D] -> [B, T, Hq, D] and weights or None."""
    if dropout:
        raise ValueError(
            f"expiring attention has no attention dropout, got {dropout}; set it to 0 or call model.eval()"
        )
    r = expire_reading
    extra: dict[str, Any] = dict(softcap=kwargs.get("softcap") or 0.0, sinks=kwargs.get("s_aux"))
    if r.slots is not None:
        return r.slots.attend(query, key, value, r.hidden, scaling, extra["sinks"]), None
    q_pos = torch.arange(r.start, r.start + query.shape[2], device=query.device)
    k_pos = q_pos if r.k_pos is None else r.k_pos
    weights = dense_weights(query, key, r, q_pos, k_pos, scaling, **extra) if r.wants_weights else None
    y = expire_attention(
        query,
        key.to(query.dtype),
        value.to(query.dtype),
        r.span,
        q_pos,
        k_pos,
        ramp=r.ramp,
        scale=scaling,
        documents=r.documents,
        impl=r.impl,
        check_values=False,
        **extra,
    )
    return y.transpose(1, 2).contiguous(), weights  # some families take a view of it


def dense_weights(
    q: Tensor,
    k: Tensor,
    r: LayerReading,
    q_pos: Tensor,
    k_pos: Tensor,
    scale: float | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention weights [B, Hq, T, seen] by absolute position, for output_attentions; zero where a memory is deleted."""
    batch, kv_heads, slots = k.shape[:3]
    span = spans_of_heads(r.span, kv_heads).expand(batch, kv_heads, slots)
    k_pos = (k_pos if k_pos.dim() == 3 else k_pos.expand(batch, slots).unsqueeze(1)).expand(batch, kv_heads, slots)
    age, span = ages(q_pos, k_pos, causal=True), exact_span(span).unsqueeze(-2)
    mask = fade(span - age.to(span.dtype), r.ramp).masked_fill(age < 0, 0).unsqueeze(2)
    if r.documents is not None:
        same = r.documents.unsqueeze(-1) == r.documents.unsqueeze(-2)
        mask = mask * same[:, None, None]
    scores = q.unflatten(1, (kv_heads, -1)).float() @ k.float().unsqueeze(2).mT  # [B, Hkv, G, T, S]
    scores = scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = (softcap * torch.tanh(scores / softcap) if softcap else scores) + mask.log()
    if sinks is not None:
        logits = sinks.float().view(1, kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.softmax(torch.cat([scores, logits], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1).masked_fill(mask.amax(-1, keepdim=True) == 0, 0)
    # Empty slots have a negative position and a weight of 0; they are added at position 0.
    place = k_pos.clamp_min(0)[:, :, None, None].expand_as(weights)
    seen = r.start + q.shape[2]
    out = weights.new_zeros(*weights.shape[:-1], seen).scatter_add(-1, place, weights)
    return out.flatten(1, 2).to(q.dtype)
