"""Adaptive-Span: each key/value head learns one span z = L * ratio for all its memories.

    m(x) = clamp((R + z - x) / R, 0, 1) on distance x,  loss = L * mean(ratio)

This is expiring attention whose span depends on the head and not on the token, so that the same kernels compute it and the
store deletes each head's memories by that head's span.

Differences from the original: the ratio is clamped to [0, 1] in the forward pass instead of after each update, and a gradient
is dropped only if it would push the ratio further out, so that a closed head can open again at once; query heads that share a
key/value head also share its span.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expire_span.models.kit.clamp import clamp_with_recovery
from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.lifetimes import LifetimeRule
from expire_span.models.systems.adaptive_span import AdaptiveSpanConfig
from expire_span.ops.slots import SpanForm


class HeadLifetimes(LifetimeRule):
    """One learned span per head, the same for every token."""

    def __init__(self, kv_heads: int, settings: AdaptiveSpanConfig) -> None:
        super().__init__()
        self.kv_heads, self.ramp, self.max_span = kv_heads, settings.ramp, settings.max_span
        self.ratio = nn.Parameter(torch.full((kv_heads,), settings.initial_span))

    @property
    def per_head(self) -> bool:
        return True

    def forward(self, h: Tensor) -> Tensor:
        ratio = clamp_with_recovery(self.ratio.to(torch.promote_types(self.ratio.dtype, torch.float32)), 0.0, 1.0)
        return (self.max_span * ratio)[None, :, None].repeat(h.shape[0], 1, h.shape[1])

    @torch.no_grad()
    def span_form(self, dim: int) -> SpanForm:
        return SpanForm.constant(self.max_span * self.ratio.float().clamp(0.0, 1.0), dim)

    def loss(self, span: Tensor, k_pos: Tensor, start: int, count: int, queries: int | None = None) -> Tensor:
        """L * mean(ratio), for each row."""
        return span[..., -1].mean(1)


class AdaptiveSpan(ExpiringAttention):
    settings_class = AdaptiveSpanConfig
    settings: AdaptiveSpanConfig
    reads_episodes = False  # type: ignore[assignment]  # its loss belongs to a block, not to single tokens

    def build_lifetimes(self) -> HeadLifetimes:
        return HeadLifetimes(self.shape.num_kv_heads, self.settings)
