"""Rotary positions with angles in float64: exact for streams of any practical length."""

# No `from __future__ import annotations` here: torch.library reads the signatures' real types.

import torch
from torch import Tensor


def rotary_angles(pos: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions [..] -> two tensors [.., dim / 2]."""
    return (_angles_op if torch.compiler.is_compiling() else _angles)(pos, dim, base, dtype)


def _angles(pos: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    power = torch.arange(0, dim, 2, dtype=torch.float64, device=pos.device) / dim
    angle = pos.to(torch.float64).unsqueeze(-1) * base**-power
    return angle.cos().to(dtype), angle.sin().to(dtype)


_angles_op = torch.library.custom_op("expire_span::rotary_angles", _angles, mutates_args=())
"""A custom op, so that torch.compile computes the table once instead of fusing float64 cosines into every elementwise
kernel."""


@_angles_op.register_fake
def _(pos, dim, base, dtype):
    shape = (*pos.shape, (dim + 1) // 2)
    return torch.empty(shape, dtype=dtype, device=pos.device), torch.empty(shape, dtype=dtype, device=pos.device)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_j, x_{j + D/2}) of the last dimension by its angle; angles broadcast against x [.., D / 2]."""
    cos, sin = angles
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
