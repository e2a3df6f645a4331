"""How many digits numbers are kept with; and those with more than half precision has, as sums of several that have it."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}
"""Bits of a float32 that half precision holds: its sign, its exponent and the first digits."""


def split_digits(x: Tensor, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Tensors of `dtype` that add up to x, each with the digits that those before it have left.

    Half precision is cut off in integers: compilers take a conversion there and back again for nothing, and nothing would be
    left.
    """
    x = x.float() if dtype in HALVES else x
    found = []
    for _ in range(parts):
        high = (x.view(torch.int32) & HALVES[dtype]).view(torch.float32) if dtype in HALVES else x.to(dtype).to(x.dtype)
        found.append(high.to(dtype))
        x = x - high
    return found


def storage_dtype(x: Tensor) -> torch.dtype:
    """Hidden states are kept as the projections read them: under autocast in its dtype, at half the size."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
