"""Fixed span, as in Transformer-XL: each query reads exactly the last L steps, itself included.

It is Expire-Span with one constant span and a hard edge: memories are deleted when they are L steps old. In training the
memory holds hidden states and recomputes keys and values from today's weights, as Transformer-XL does.

Difference from the original: there a query sees between L and L + block - 1 steps, depending on its place in the block.
"""

from __future__ import annotations

from torch import Tensor, nn

from expire_span.config import ExpireSpanConfig
from expire_span.mixer_configs import TransformerXLConfig

from .expire_span import ExpireSpan
from .full import ConstantSpans


class TransformerXL(ExpireSpan):
    def rules(self) -> ExpireSpanConfig:
        assert isinstance(self.config.mixer, TransformerXLConfig)
        return ExpireSpanConfig(max_span=self.config.mixer.span, ramp=1)

    def build_predictor(self) -> nn.Module:
        return ConstantSpans(self.mixer.max_span - 1)  # with a ramp of 1, age `span` is the first that is dead

    def _span_loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> None:
        return None
