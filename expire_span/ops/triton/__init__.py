"""Fused GPU kernels over live memories. Nothing outside this folder imports triton.

`triton_attention` is for training and inference; `triton_decode` is for a few queries over a store, without gradients. Both take
the tensors of the public operator in any of the shapes it allows, because every view would cost host time: q [B, Hq, T, D],
k and v [B, Hkv, S, D], span [B, S] or [B, P, S], q_pos [T] or [B, T], k_pos [S], [B, S] or [B, Hkv, S].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attend
from .decode import triton_decode
from .products import add_linear_, norm_linear
from .slots import triton_step

__all__ = ["add_linear_", "norm_linear", "triton_attention", "triton_decode", "triton_step"]


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    include_self: bool = True,
    scale: float,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    documents: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Expiring attention y [B, Hq, T, D] with gradients to q, k, v, span and relative_keys.

    documents: document ids of queries [B, T] and memories [B, S], never decreasing along a row. deterministic: gradients that
    are bitwise equal from run to run.

    relative_keys [M, D]: their scores are computed before the kernels, as a table [B, T, Hq, M] that the kernels index by age.
    The table's gradient has one entry for each query and age. Two memories at one position that are alive at the same time
    would both write that entry, and the gradient of one of them would be lost.
    """
    if q.shape[2] == 0 or k.shape[2] == 0:
        return torch.zeros_like(q)
    q, scale = _positive_scale(q, scale)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    q_pos = q_pos if q_pos.stride(-1) == 1 else q_pos.contiguous()
    q_doc, k_doc = (x.contiguous() for x in documents) if documents is not None else (None, None)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    has_relative = relative_keys is not None and relative_keys.shape[0] > 0
    relative_keys = relative_keys.to(q.dtype) if has_relative else None
    options = (ramp, include_self, scale, normalizer_eps, deterministic)
    return attend(q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, *options)


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a positive scale with the same product. The kernels take the maximum of scores before they scale them."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)
