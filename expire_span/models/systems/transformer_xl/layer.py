"""Fixed span, as in Transformer-XL: each query reads exactly the last L steps, itself included.

It is expiring attention with one constant span and a hard edge: memories are deleted when they are L steps old. In training the
memory holds hidden states, from which keys and values are recomputed with the current weights, as in Transformer-XL.

Difference from the original: there a query sees between L and L + block - 1 steps, depending on its place in the block.
"""

from __future__ import annotations

from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.lifetimes import ConstantLifetimes
from expire_span.models.systems.transformer_xl import TransformerXLConfig


class TransformerXL(ExpiringAttention):
    settings_class = TransformerXLConfig
    settings: TransformerXLConfig

    def build_lifetimes(self) -> ConstantLifetimes:
        """A constant span with a ramp of 1 is a hard edge: memories of age `span` are dead, younger ones have full weight."""
        return ConstantLifetimes(self.shape.num_kv_heads, self.settings.span - 1)
