"""The dtype in which hidden states are stored, and splitting float32 numbers into sums of half-precision ones."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = {torch.bfloat16: -(1 << 16), torch.float16: -(1 << 13)}
"""For each half-precision dtype, a mask of the bits of a float32 that it can hold: sign, exponent and leading digits."""


def split_digits(x: Tensor, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """Tensors of `dtype` that add up to x: the first holds the leading digits, each further one what is still missing.

    Digits are cut off by masking bits of the integer representation: a compiler may remove a conversion to half precision and
    back as a no-operation, and the remainder would then be zero.
    """
    x = x.float() if dtype in HALVES else x
    found = []
    for _ in range(parts):
        high = (x.view(torch.int32) & HALVES[dtype]).view(torch.float32) if dtype in HALVES else x.to(dtype).to(x.dtype)
        found.append(high.to(dtype))
        x = x - high
    return found


def storage_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which hidden states x are stored: the one in which projections read them, which is autocast's where it is
    on. That halves the bytes held."""
    if torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
