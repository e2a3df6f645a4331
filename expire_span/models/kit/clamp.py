"""A clamp whose gradient passes when it points back into the range, so that a clamped value can recover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ClampWithRecovery(torch.autograd.Function):
    """x clamped to [low, high]; the gradient is dropped only where it would push a clamped value further out.

    A plain clamp gives no gradient outside the range, so that a value outside never comes back; without a clamp, a value that
    is pushed outward for long drifts far away. Use it on parameters, not on the many values that tokens derive from one
    parameter: dropping the outward gradients of single tokens would bias their sum inward.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.range = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        low, high = ctx.range
        outward = ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))  # a step goes against the gradient
        return grad.masked_fill(outward, 0), None, None


def clamp_with_recovery(x: Tensor, low: float, high: float) -> Tensor:
    return ClampWithRecovery.apply(x, low, high)  # type: ignore[return-value]
