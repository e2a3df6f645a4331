"""Full attention: the Transformer that never forgets.

Sequences that stand alone run on torch's fused attention. With carried memory it is Expire-Span with spans that never end,
so that the same store and the same kernels serve it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.config import ExpireSpanConfig

from .expire_span import ExpireSpan
from .mixer import MixerAux

FOREVER = 2**31
"""A span in steps that no stream outlives."""


class ConstantSpans(nn.Module):
    """Every memory gets the same span: in place of a predictor."""

    def __init__(self, span: int) -> None:
        super().__init__()
        self.span = span

    def forward(self, h: Tensor) -> Tensor:
        """h [B, S, C] -> spans [B, 1, S], in float32 or better."""
        dtype = torch.promote_types(h.dtype, torch.float32)
        return torch.full((h.shape[0], 1, h.shape[1]), float(self.span), dtype=dtype, device=h.device)


class Full(ExpireSpan):
    def rules(self) -> ExpireSpanConfig:
        return ExpireSpanConfig(max_span=FOREVER, ramp=1)

    def build_predictor(self) -> nn.Module:
        return ConstantSpans(FOREVER)

    def can_record(self, carried: bool) -> bool:
        alone = not carried and self.relative_keys is None  # torch's own attention serves these
        return alone or super().can_record(carried)

    def _attend(self, x: Tensor, k: Tensor, v: Tensor, span: Tensor, pos: Tensor, k_pos: Tensor) -> Tensor:
        alone = k.shape[2] == x.shape[1]
        if not alone or self.relative_keys is not None:
            return super()._attend(x, k, v, span, pos, k_pos)
        q = self._place(self._split(self.query(x)), pos)
        grouped = k.shape[1] != q.shape[1]
        y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=grouped)
        return self._finish(y)

    def _report(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> MixerAux:
        aux = super()._report(span, k_pos, start, count)
        aux.span = None  # nothing was given a span
        return aux

    def _span_loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> None:
        return None
