"""Full attention: the Transformer that never forgets.

Sequences without carried memory run on torch's fused attention. With carried memory, this is expiring attention with spans that
never end, so that the same stores and kernels can be used.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.expiring import ExpiringAttention
from expire_span.models.lifetimes import ConstantLifetimes
from expire_span.models.mixer import Recordable
from expire_span.models.systems.full import FullConfig

FOREVER = 2**31
"""A span, in steps, longer than any stream."""


class Full(ExpiringAttention):
    settings_class = FullConfig

    def build_lifetimes(self) -> ConstantLifetimes:
        return ConstantLifetimes(self.shape.num_kv_heads, FOREVER, reports_spans=False)

    def recordable(self) -> Recordable:
        steady = super().recordable()
        return replace(steady, alone=steady.alone or self.relative_keys is None)  # these run on torch's fused attention

    def attend(
        self,
        x: Tensor,
        k: Tensor,
        v: Tensor,
        span: Tensor,
        pos: Tensor,
        k_pos: Tensor,
        documents: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        alone = k.shape[2] == x.shape[1] and documents is None
        if not alone or self.relative_keys is not None:
            return super().attend(x, k, v, span, pos, k_pos, documents)
        q = self.queries(x, pos)
        grouped = k.shape[1] != q.shape[1]
        y = F.scaled_dot_product_attention(
            q, k.to(q.dtype), v.to(q.dtype), is_causal=self.rules.causal, enable_gqa=grouped
        )
        return self.join_heads(y, x)
