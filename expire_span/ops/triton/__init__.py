"""Fused GPU kernels over live memories. Nothing outside this folder imports triton.

`triton_attention` is for training and inference; `triton_decode` is for a few queries over a store, without gradients. Both take
the tensors of the public operator in any of the shapes it allows, because every view would cost host time: q [B, Hq, T, D],
k and v [B, Hkv, S, D], span [B, S] or [B, P, S], q_pos [T] or [B, T], k_pos [S], [B, S] or [B, Hkv, S].
"""

from __future__ import annotations

from .attention import triton_attention
from .block_slots import triton_block_step
from .compaction import triton_compact
from .decode import triton_decode
from .products import add_linear_, norm_linear
from .slots import triton_step

__all__ = [
    "add_linear_",
    "norm_linear",
    "triton_attention",
    "triton_block_step",
    "triton_compact",
    "triton_decode",
    "triton_step",
]
