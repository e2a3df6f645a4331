"""The linear maps of a decoding step, each as one kernel: RMS norm, product and squared ReLU, or product and residual.

With few rows the time of a step depends on the number of kernels, not on arithmetic. The norm multiplies a whole row by one factor.
So that factor is computed while the product runs and applied to the result; no normalised row is ever stored.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import run_kernel


class ProductTiles(NamedTuple):
    """Tile sizes of a program (rows, outputs, inputs), its warps, and its pipeline stages."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


FEW_ROWS = ProductTiles(16, 16, 128, 4, 4)
MANY_ROWS = (ProductTiles(64, 64, 128, 4, 3), ProductTiles(64, 32, 128, 4, 3), ProductTiles(32, 32, 128, 4, 4))
"""Tiles for many rows, the largest first, since they read least; smaller ones are used where larger ones leave the GPU partly idle."""
MULTIPROCESSORS = 132
"""Number of multiprocessors of a large GPU (H100, H200)."""
_override: ProductTiles | None = None


def override(tiles: ProductTiles | None) -> None:
    """Use other tiles (benchmarks); None goes back to the usual ones."""
    global _override
    _override = tiles


def choose_tiles(rows: int, outputs: int) -> ProductTiles:
    if _override is not None or rows <= 32:
        return _override or FEW_ROWS
    enough = (
        t for t in MANY_ROWS if triton.cdiv(rows, t.rows) * triton.cdiv(outputs, t.outputs) >= 0.9 * MULTIPROCESSORS
    )
    return next(enough, MANY_ROWS[-1])


@triton.jit
def _linear(
    x, gain, weight, residual, y, rows, width, outputs, x_row, eps,
    NORM: tl.constexpr, SQUARE: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, width, BLOCK_K):
        c = start + tl.arange(0, BLOCK_K)
        there = c < width
        a = tl.load(x + m[:, None] * x_row + c[None, :], mask=(m < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(weight + n[None, :] * width + c[:, None], mask=(n < outputs)[None, :] & there[:, None], other=0.0)
        if NORM:
            wide = a.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            a = (wide * tl.load(gain + c, mask=there, other=0.0).to(tl.float32)[None, :]).to(b.dtype)
        acc = tl.dot(a, b, acc)
    if NORM:
        acc = acc * (1.0 / tl.sqrt(squares / width + eps))[:, None]
    if SQUARE:
        acc = tl.maximum(acc, 0.0)
        acc = acc * acc
    at = m[:, None] * outputs + n[None, :]
    inside = (m < rows)[:, None] & (n < outputs)[None, :]
    if ADD:
        acc += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=inside)


def _run(x: Tensor, weight: Tensor, y: Tensor, gain: Tensor, eps: float, **flags: bool) -> Tensor:
    rows, width, outputs = x.shape[0], x.shape[1], weight.shape[0]
    t = choose_tiles(rows, outputs)
    grid = (triton.cdiv(outputs, t.outputs), triton.cdiv(rows, t.rows))
    run_kernel(
        _linear, grid, x, gain, weight, y, y, rows, width, outputs, x.stride(0), eps, **flags,
        BLOCK_M=t.rows, BLOCK_N=t.outputs, BLOCK_K=t.inputs, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return y


def norm_linear(x: Tensor, gain: Tensor, eps: float, weight: Tensor, *, square_relu: bool = False) -> Tensor:
    """RMS norm of x [B, C] with `gain` [C], times weight [N, C], transposed; optionally followed by a squared ReLU: [B, N]."""
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return _run(x, weight, y, gain, eps, NORM=True, SQUARE=square_relu, ADD=False)


def add_linear_(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """y [B, N] += x [B, C] times weight [N, C], transposed, in place. y is contiguous."""
    return _run(x, weight, y, weight, 0.0, NORM=False, SQUARE=False, ADD=True)
