"""A clamp whose gradient passes when it points back into the range, so that a clamped value can recover."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.ops.context.current import active_context, outside_graphs


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
        (x,), (low, high) = ctx.saved_tensors, ctx.range
        return grad.masked_fill(_outward(x, grad, low, high), 0), None, None


class _ClampInParts(torch.autograd.Function):
    """The same in a context, where this part has a share of the gradient and the sum of all decides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        ctx.x, ctx.range, ctx.context = x, (low, high), active_context()
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, (low, high) = ctx.x, ctx.range
        return ctx.context.share_gradient(x, grad, lambda total: _outward(x, total, low, high)), None, None


def _outward(x: Tensor, grad: Tensor, low: float, high: float) -> Tensor:
    """Where a step against the gradient leads a clamped value further out."""
    return ((x <= low) & (grad > 0)) | ((x >= high) & (grad < 0))


def clamp_with_recovery(x: Tensor, low: float, high: float) -> Tensor:
    """x: a parameter."""
    if active_context() is None:
        return ClampWithRecovery.apply(x, low, high)  # type: ignore[return-value]
    return outside_graphs(_ClampInParts.apply, x, low, high)
