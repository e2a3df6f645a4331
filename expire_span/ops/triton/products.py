"""The linear maps of a decoding step, each as one kernel: RMS norm, product and squared ReLU, or product and residual.

With few rows the time of a step depends on the number of kernels, not on arithmetic. The norm multiplies a whole row by one factor,
which can be applied to the product; no normalised row is ever stored. The factor follows from the row's sum of squares, and the
kernel that wrote the row has computed it, one part for each of its programs. The norm's gain is multiplied into the weights
beforehand. So tiles go from memory into the product as they are, which lets the GPU load them while it multiplies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import run_kernel
from .layout import power_of_2


class ProductTiles(NamedTuple):
    """Tile sizes of a program (rows, outputs, inputs), its warps, and its pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW_ROWS = ProductTiles(16, 32, 256, 4, 3)
MANY_ROWS = (ProductTiles(64, 64, 128, 4, 3), ProductTiles(64, 32, 128, 4, 3), ProductTiles(64, 16, 256, 4, 3))
"""Tiles for many rows, the largest first, since they read least; smaller ones are used where larger ones leave the GPU too idle. All
of them have the 64 rows that a Hopper GPU's tensor cores take at once."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of a large GPU (H100, H200)."""
LONG_INPUTS = 1024
"""From this width on, a product takes so long that the whole GPU should work on it; below, half of it is enough."""
_override: ProductTiles | None = None


def override(tiles: ProductTiles | None) -> None:
    """Use other tiles (benchmarks); None goes back to the usual ones."""
    global _override
    _override = tiles


def choose_tiles(rows: int, outputs: int, inputs: int) -> ProductTiles:
    if _override is not None or rows <= 32:
        return _override or FEW_ROWS
    least = (0.9 if inputs >= LONG_INPUTS else 0.45) * MULTIPROCESSORS
    enough = (t for t in MANY_ROWS if triton.cdiv(rows, t.rows) * triton.cdiv(outputs, t.outputs) >= least)
    return next(enough, MANY_ROWS[-1])


@triton.jit
def _linear(
    x, squares, weight, y, squares_of_y, rows, width, outputs, x_row, eps,
    NORM: tl.constexpr, SQUARE: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr, SUMS_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of outputs. With NORM, rows of x are divided by their root mean square, from SUMS sums of squares per row, or, where
    SUMS is 0, from the squares of x itself. With ADD, the product is added to y, and the new row's sums of squares are stored."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, width, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        there = c < width
        a = tl.load(x + m[:, None] * x_row + c[None, :], mask=(m < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(weight + n[None, :] * width + c[:, None], mask=(n < outputs)[None, :] & there[:, None], other=0.0)
        if NORM and SUMS == 0:
            wide = a.to(tl.float32)
            total += tl.sum(wide * wide, 1)
        acc = tl.dot(a, b, acc)
    if NORM:
        if SUMS > 0:
            part = tl.arange(0, SUMS_PAD)
            known = (m < rows)[:, None] & (part < SUMS)[None, :]
            total = tl.sum(tl.load(squares + m[:, None] * SUMS + part[None, :], mask=known, other=0.0), 1)
        acc = acc * (1.0 / tl.sqrt(total / width + eps))[:, None]
    if SQUARE:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    at = m[:, None] * outputs + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    if ADD:
        acc += tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    result = acc.to(y.dtype.element_ty)
    tl.store(y + at, result, mask=inside)
    if ADD:
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        tl.store(squares_of_y + m * tl.num_programs(0) + tl.program_id(0), tl.sum(wide * wide, 1), mask=m < rows)


def _run(x: Tensor, squares: Tensor | None, weight: Tensor, y: Tensor, eps: float, **flags: bool) -> Tensor:
    """Run the kernel; returns the sums of squares of y's rows [B, programs], which only additions write."""
    rows, width, outputs = x.shape[0], x.shape[1], weight.shape[0]
    t = choose_tiles(rows, outputs, width)
    grid = (triton.cdiv(outputs, t.outputs), triton.cdiv(rows, t.rows))
    found = torch.empty(rows, grid[0], dtype=torch.float32, device=x.device) if flags["ADD"] else y
    sums = 0 if squares is None else squares.shape[1]
    run_kernel(
        _linear, grid, x, x if squares is None else squares, weight, y, found, rows, width, outputs, x.stride(0), eps, **flags,
        SUMS=sums, SUMS_PAD=power_of_2(sums or 1), BLOCK_M=t.rows, BLOCK_N=t.outputs, BLOCK_K=t.inputs, num_warps=t.warps,
        num_stages=t.stages,
    )  # fmt: skip
    return found


def fold_gain(weight: Tensor, gain: Tensor) -> Tensor:
    """The weights [N, C] of a product after a norm with `gain` [C], for `norm_linear`."""
    return (weight.float() * gain.float()).to(weight.dtype)


def norm_linear(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, *, square_relu: bool = False) -> Tensor:
    """RMS norm of x [B, C] times weight [N, C], transposed; optionally followed by a squared ReLU: [B, N].

    squares [B, P]: parts of the sum of squares of each row of x, as `add_linear_` returns them; None computes them here. weight
    contains the norm's gain (`fold_gain`).
    """
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    _run(x, squares, weight, y, eps, NORM=True, SQUARE=square_relu, ADD=False)
    return y


def add_linear_(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y [B, N] += x [B, C] times weight [N, C], transposed, in place; returns the squares of y for `norm_linear`. y is contiguous."""
    return _run(x, None, weight, y, 0.0, NORM=False, SQUARE=False, ADD=True)
