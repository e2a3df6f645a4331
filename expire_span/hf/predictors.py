"""The span predictor of a retrofitted layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expire_span.models.lifetimes import Lifetimes
from expire_span.ops.slots import SpanForm
from expire_span.settings.retrofit import RetrofitConfig


class StandardisedLifetimes(Lifetimes):
    """Learned spans of hidden states whose dimensions are standardised to mean 0 and standard deviation 1 before the linear
    map.

        e_i = L sigmoid(w . (h_i - center) x scale / tau + b)

    Hidden states of pretrained models have a few dimensions that are a hundred times as large as the others and nearly
    constant. With the means subtracted, the bias alone decides how long a head remembers on average and the weights decide how
    tokens differ, so that one learning rate fits all layers of all models. Until `standardise` is called, center is 0 and scale
    is 1.
    """

    center: Tensor
    scale: Tensor

    def __init__(self, dim: int, kv_heads: int, config: RetrofitConfig) -> None:
        super().__init__(dim, kv_heads, config.lifetimes())
        self.register_buffer("center", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))

    @torch.no_grad()
    def standardise(self, h: Tensor) -> None:
        """Set center and scale from hidden states [.., C], and change weight and bias so that predicted spans stay the same."""
        weight, bias = self._folded()
        flat = h.flatten(0, -2).float()
        spread, center = torch.std_mean(flat, 0)
        self.center.copy_(center)
        self.scale.copy_(1 / spread.clamp_min(1e-3 * spread.mean().clamp_min(1e-6)))
        self.weight.copy_(weight * self.temperature / self.scale)
        self.bias.copy_(bias + weight @ self.center)

    def _folded(self) -> tuple[Tensor, Tensor]:
        """Weight (divided by the temperature) and bias that give the same spans for hidden states without standardising."""
        weight = self._scaled_weight()
        return weight, self.bias - weight @ self.center

    def _scaled_weight(self) -> Tensor:
        return super()._scaled_weight() * self.scale

    def _spans(self, product: Tensor) -> Tensor:
        return super()._spans(product - (self._scaled_weight() @ self.center).to(product.dtype))

    @torch.no_grad()
    def span_form(self, dim: int) -> SpanForm | None:
        form = super().span_form(dim)
        return form if form is None else form._replace(bias=self._folded()[1].float())


def build_predictor(dim: int, kv_heads: int, config: RetrofitConfig) -> nn.Module:
    """A module that maps hidden states [B, S, C] to spans [B, Hkv, S] in tokens; its weights are float32."""
    return StandardisedLifetimes(dim, kv_heads, config).float()
