"""Adaptive-Span: each key/value head learns one span z = L * ratio for all its memories.

    m(x) = clamp((R + z - x) / R, 0, 1) on distance x,  loss = L * mean(ratio)

This is Expire-Span with a span per head that does not depend on the token, so that the store trims each head's memories
to its own span and the same kernels serve it.

Differences from the original: instead of being clamped after each update, the ratio is held to [0, 1] in the forward pass, and
a gradient that would push it further out is dropped, so that a closed head can open again at once; grouped query heads share
their key/value head's span.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expire_span.config import ExpireSpanConfig
from expire_span.mixer_configs import AdaptiveSpanConfig

from .expire_span import ExpireSpan
from .hold import hold


class HeadSpans(nn.Module):
    """One learned span per head, the same for every token."""

    def __init__(self, heads: int, max_span: int, initial_span: float) -> None:
        super().__init__()
        self.max_span = max_span
        self.ratio = nn.Parameter(torch.full((heads,), initial_span))

    def forward(self, h: Tensor) -> Tensor:
        """h [B, S, C] -> spans [B, heads, S]."""
        ratio = hold(self.ratio, 0.0, 1.0)
        return (self.max_span * ratio)[None, :, None].repeat(h.shape[0], 1, h.shape[1])


class AdaptiveSpan(ExpireSpan):
    def rules(self) -> ExpireSpanConfig:
        m = self.config.mixer
        assert isinstance(m, AdaptiveSpanConfig)
        return ExpireSpanConfig(max_span=m.max_span, ramp=m.ramp, span_per="kv_head")

    def build_predictor(self) -> nn.Module:
        assert isinstance(self.config.mixer, AdaptiveSpanConfig)
        return HeadSpans(self.span_outputs, self.mixer.max_span, self.config.mixer.initial_span)

    def _span_loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        return span[..., -1].mean(1)  # [B]: L * mean(ratio)
