"""Rotary positions with angles in float64: exact for streams of any practical length."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_angles(pos: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions [..] -> two tensors [.., dim / 2], float64."""
    power = torch.arange(0, dim, 2, dtype=torch.float64, device=pos.device) / dim
    angle = pos.to(torch.float64).unsqueeze(-1) * base**-power
    return angle.cos(), angle.sin()


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_j, x_{j + D/2}) of the last dimension by its angle; angles broadcast against x [.., D / 2]."""
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (a.to(work) for a in angles)
    left, right = x.to(work).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
