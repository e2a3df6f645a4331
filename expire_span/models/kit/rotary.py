"""Rotary positions whose angles are exact at every position, so that keys are rotated once, and never renumbered.

A frequency is a whole number of turns / 2**64 per token. Its product with a position wraps around in 64-bit integers, as turns
do, so that the difference of two phases depends on the distance alone, wherever query and key stand.
"""

# No `from __future__ import annotations` here: torch.library reads the signatures' real types.

import math

import torch
from torch import Tensor


def rotary_angles(pos: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines for integer positions [..] -> two tensors [.., dim / 2]."""
    return (_angles_op if torch.compiler.is_compiling() else _angles)(pos, dim, base, dtype)


def _angles(pos: Tensor, dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return angles_of_turns(pos, turns_per_token(dim, base, pos.device), dtype)


_angles_op = torch.library.custom_op("expire_span::rotary_angles", _angles, mutates_args=())
"""A custom op, so that torch.compile computes the table once instead of fusing float64 cosines into every elementwise
kernel."""


@_angles_op.register_fake
def _(pos, dim, base, dtype):
    shape = (*pos.shape, (dim + 1) // 2)
    return torch.empty(shape, dtype=dtype, device=pos.device), torch.empty(shape, dtype=dtype, device=pos.device)


def turns_per_token(dim: int, base: float, device: torch.device) -> Tensor:
    """Turns per token in units of 2**-64, [dim / 2]; with a base above 1, none has more than a sixth of a turn."""
    power = torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
    return (base**-power * (2**64 / (2 * math.pi))).round().to(torch.int64)


def angles_of_turns(pos: Tensor, turns: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [.., D / 2] for integer positions [..] and `turns_per_token` [D / 2]."""
    phase = pos.to(torch.int64).unsqueeze(-1) * turns
    angle = phase.to(torch.float64) * (math.pi / 2**63)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x_j, x_{j + D/2}) of the last dimension by its angle; angles broadcast against x [.., D / 2]."""
    cos, sin = angles
    left, right = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
