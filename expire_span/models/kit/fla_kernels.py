"""How the kernels of flash-linear-attention (`fla-core`) are called; the package is imported at the first call.

The kernels are opaque to torch.compile: the code before and after a call is compiled, the call itself is not. Declaring that
loads the compiler, which takes a second, so only the systems that have such kernels import this module.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .fla import SOUND_CHANNELS, tile_of


@functools.cache
def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


@functools.cache
def _narrow_guard() -> None:
    """Narrow fla's check against miscompiled kernels, which refuses keys of every size, to the sizes that are affected."""
    kernels: Any = importlib.import_module("fla.ops.common.chunk_o")
    rule: Any = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    refuses = kernels.chunk_bwd_dqkwg

    def allow_sound_tiles(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        known = kernels.TRITON_ABOVE_3_7_1
        kernels.TRITON_ABOVE_3_7_1 = known or tile_of(min(k.shape[-1], v.shape[-1])) == SOUND_CHANNELS
        try:
            return refuses(q, k, v, *args, **options)
        finally:
            kernels.TRITON_ABOVE_3_7_1 = known

    if hasattr(kernels, "TRITON_ABOVE_3_7_1"):
        rule.chunk_bwd_dqkwg = allow_sound_tiles


@torch.compiler.disable()
def gated_delta_kernel(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: q, k [B, T, H, K] of length 1, v [B, T, H, V], gates [B, T, H], state [B, H, K, V]."""
    rule = _load("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    _narrow_guard()
    return rule(q, k, v, log_gate, strength, initial_state=state, output_final_state=True)


@torch.compiler.disable()
def forgetting_kernel(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor) -> Tensor:
    """Forget-gate attention of a block without memory before it: q [B, T, H, D], k, v [B, T, Hkv, D], log_gate [B, T, H].

    The kernel has no input for keys and values of earlier blocks.
    """
    attend = _load("fla.ops.forgetting_attn", "parallel_forgetting_attn")
    return attend(q, k, v, log_gate)
