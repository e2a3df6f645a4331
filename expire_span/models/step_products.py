"""The linear maps of a decoding step, fused where a kernel for it exists with the norm before them or the sum after them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class StepStates(NamedTuple):
    """The hidden states of one token of every row."""

    x: Tensor
    """[B, C]"""
    squares: Tensor | None = None
    """Parts of each row's sum of squares [B, P], if the kernel that wrote x computed them: the next norm needs them."""


def folds(norm: nn.Module, weight: Tensor) -> bool:
    """Whether a kernel exists that fuses this norm with a product with weights like these: RMSNorm in half precision."""
    half = weight.dtype in (torch.bfloat16, torch.float16)
    return half and isinstance(norm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None


def fold_gain(weight: Tensor, norm: Any) -> Tensor:
    """The weights that `norm_linear` takes: with the norm's gain multiplied into them."""
    from expire_span.ops.triton import products

    return products.fold_gain(weight.detach(), norm.weight.detach())


def norm_linear(states: StepStates, norm: Any, weight: Tensor, square_relu: bool = False) -> Tensor:
    """Norm and product as one kernel; see `folds`. weight comes from `fold_gain`."""
    from expire_span.ops import triton

    return triton.norm_linear(states.x, states.squares, norm.eps, weight, square_relu=square_relu)


def add_linear(x: Tensor, y: Tensor, weight: Tensor, folded: bool) -> StepStates:
    """x += y weight^T, in place."""
    if not folded:
        return StepStates(x.addmm_(y, weight.t()))
    from expire_span.ops import triton

    return StepStates(x, triton.add_linear_(x, y, weight))
