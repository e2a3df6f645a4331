"""A call of the operator whose arguments have been checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .choice import DECODE_QUERIES


@dataclass(frozen=True)
class Call:
    """The checked arguments of a call: positions are int64, spans have the dtype in which lifetimes are computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Tensor
    q_pos: Tensor
    k_pos: Tensor
    ids: tuple[Tensor, Tensor] | None
    ramp: float
    include_self: bool
    scale: float
    relative_keys: Tensor | None
    normalizer_eps: float
    softcap: float
    sinks: Tensor | None
    causal: bool
    deterministic: bool
    check: bool
    """Whether the values of tensors are checked, for which the host waits for the device."""
    impl: str
    """The implementation that was chosen."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that every implementation takes, `documents` apart."""
        return dict(ramp=self.ramp, include_self=self.include_self, scale=self.scale)

    @property
    def paper_options(self) -> dict[str, Any]:
        """The two options that only the paper's models use: relative keys and the epsilon of the normaliser."""
        return dict(relative_keys=self.relative_keys, normalizer_eps=self.normalizer_eps)

    @property
    def model_options(self) -> dict[str, Any]:
        """Two options that pretrained models use: soft caps and sinks."""
        return dict(softcap=self.softcap, sinks=self.sinks)

    @property
    def learns(self) -> bool:
        leaves = (self.q, self.k, self.v, self.span, self.relative_keys, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)

    @property
    def decodes(self) -> bool:
        """Whether there are so few queries, without gradient, that a single pass without live lists is faster."""
        return self.q.shape[2] <= DECODE_QUERIES and not self.learns

    def lifetimes_by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """span [B, P, S], q_pos [B, 1, T] and k_pos [B, P, S], where P is 1, or Hkv if either is given per head."""
        (batch, kv_heads), span, k_pos = self.k.shape[:2], self.span, self.k_pos
        span = span.unsqueeze(1) if span.dim() == 2 else spans_of_heads(span, kv_heads)
        q_pos = self.q_pos.expand(batch, -1).unsqueeze(1)
        k_pos = k_pos.expand(batch, -1).unsqueeze(1) if k_pos.dim() < 3 else k_pos
        if span.shape[1] != k_pos.shape[1]:  # one of them is given per head, so the other is expanded
            span, k_pos = span.expand(-1, kv_heads, -1), k_pos.expand(-1, kv_heads, -1)
        return span, q_pos, k_pos


def spans_of_heads(span: Tensor, kv_heads: int) -> Tensor:
    """Expand spans [B, P, S] with P in 1..Hkv to one row per head, [B, Hkv, S]; P = 1, shared by all heads, stays."""
    if span.dim() == 2 or span.shape[1] in (1, kv_heads):
        return span
    shared = span[:, -1:].expand(-1, kv_heads - span.shape[1], -1)
    return torch.cat([span, shared], 1)
