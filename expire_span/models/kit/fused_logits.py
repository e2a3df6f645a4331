"""Span logits in float32 precision from half-precision hidden states, with a backward pass fused with that of the values.

Half precision is too coarse for spans, but a float32 copy of the hidden states would cost another pass over GPU memory. So the
predictor reads the hidden states in the same half-precision dtype as the other projections, and multiplies and accumulates in
float32. In compiled code this adds hardly any time: with one row of weights the product is fused with the norm before it,
several rows are one matrix product, and the gradient is computed together with that of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .precision import HALVES, split_digits

ALIGNED = 8
"""Fast half-precision matrix products need a number of columns that is a multiple of this."""


class ValuesAndLogits(torch.autograd.Function):
    """h [B, S, C], value [V, C] and weight [n, C] -> h . value [B, S, V], and h . weight [B, S, n] in weight's dtype.

    Gradients are matrix products in h's dtype, like those of other weights. The gradients that h gets from values and from
    logits are one product: two products would each be written to memory, and then read again to be added.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h, value, weight)
        return h @ value.T, _logits(h, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        h, value, weight = ctx.saved_tensors
        rows, more = h.flatten(0, 1), -len(weight) % ALIGNED
        grads = torch.cat([grad, F.pad(grad_logits, (0, more))], -1).to(h.dtype).flatten(0, 1)
        weights = torch.cat([value, F.pad(weight, (0, 0, 0, more)).to(h.dtype)])
        grad_value, grad_weight = (grads.T @ rows).split([len(value), len(weight) + more])
        return (grads @ weights).view_as(h), grad_value, grad_weight[: len(weight)].to(weight.dtype)


class Logits(torch.autograd.Function):
    """h [B, S, C] and weight [n, C] -> h . weight [B, S, n] in weight's dtype. h gets no gradient (stop-gradient)."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _logits(h, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        columns = F.pad(grad, (0, -grad.shape[-1] % ALIGNED)).to(h.dtype).flatten(0, 1)
        return None, (columns.T @ h.flatten(0, 1))[: grad.shape[-1]].to(grad.dtype)


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    """h [B, S, C] . weight [n, C] -> [B, S, n] in weight's dtype."""
    if h.device.type == "cuda" and h.dtype in HALVES and len(weight) > 1:
        return _product_in_float32(h, weight)
    return torch.stack([(h.to(weight.dtype) * row).sum(-1) for row in weight.unbind()], -1)


def _product_in_float32(h: Tensor, weight: Tensor) -> Tensor:
    """Half-precision h [B, S, C] times float32 weight [n, C], which is split into a sum of two half-precision weights.

    The relative error of the weight is about 2^-16.
    """
    halves = F.pad(torch.cat(split_digits(weight, h.dtype, 2)), (0, 0, 0, -2 * len(weight) % ALIGNED))
    both = torch.ops.aten.mm.dtype(h.flatten(0, 1), halves.T, torch.float32)
    return (both[:, : len(weight)] + both[:, len(weight) : 2 * len(weight)]).unflatten(0, h.shape[:2])
