"""Values held to a range that can be left again at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Hold(torch.autograd.Function):
    """x held to [low, high]; of the gradient, what leads further out is dropped.

    A plain clamp drops all of it, so that what is out stays out; without it, what is pressed outward for long drifts away.
    For parameters, not for values that many tokens make of one: each gradient that is dropped there leaves the noise of
    others, which leads inward.
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


def hold(x: Tensor, low: float, high: float) -> Tensor:
    return Hold.apply(x, low, high)  # type: ignore[return-value]
