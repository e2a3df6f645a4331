"""Kernels of flash-linear-attention (`fla-core`) for rivals on a GPU: which layer may use them, and how they are called.

The package is an extra (`pip install 'expire-span[fla]'`) and is imported at the first call. Its kernels are opaque to
torch.compile: what stands before and after a call is compiled, the call itself is not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

Kernels = Literal["auto", "torch", "fla"]
LEAST_COUNT = 16
"""Fewer steps than this are not worth a kernel that works in chunks of 64: decoding is plain PyTorch."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("fla", "einops", "triton"))
_warned: set[str] = set()
"""The reasons for a fallback on a GPU that the user has already been told."""


def resolve_kernels(
    impl: Kernels, kind: str, device: torch.device, dtype: torch.dtype | None = None, count: int | None = None
) -> Literal["torch", "fla"]:
    """What `impl` stands for: fla's kernels on a GPU that has them, plain PyTorch elsewhere.

    A count of steps that is too small for a kernel always takes PyTorch. A GPU on which auto falls back for another reason
    warns, once per reason.
    """
    if impl == "torch" or (impl == "auto" and device.type != "cuda") or (count is not None and count < LEAST_COUNT):
        return "torch"
    obstacle = _find_obstacle(device, dtype)
    if obstacle is None:
        return "fla"
    if impl == "fla":
        raise ValueError(f"{kind} with impl='fla' {obstacle}; use impl='torch' or impl='auto'")
    _warn_once(kind, obstacle)
    return "torch"


def _find_obstacle(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why fla's kernels cannot serve this, or None."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {device.type}"
    if not _INSTALLED:
        return "needs the package fla-core, which is not installed (pip install 'expire-span[fla]')"
    if dtype is not None and dtype not in DTYPES:
        return f"serves bfloat16, float16 and float32, got {str(dtype).removeprefix('torch.')}"
    return None


def _warn_once(kind: str, obstacle: str) -> None:
    reason = f"{kind} runs in plain PyTorch on this GPU, because impl='fla' {obstacle}"
    if reason in _warned or torch.compiler.is_compiling():
        return
    _warned.add(reason)
    warnings.warn(reason, stacklevel=4)


@functools.cache
def _load(module: str, name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(module), name)


@torch.compiler.disable()
def gated_delta_kernel(
    q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule: q, k [B, T, H, K] of length 1, v [B, T, H, V], gates [B, T, H], state [B, H, K, V]."""
    rule = _load("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")
    return rule(q, k, v, log_gate, strength, initial_state=state, output_final_state=True)


@torch.compiler.disable()
def forgetting_kernel(q: Tensor, k: Tensor, v: Tensor, log_gate: Tensor) -> Tensor:
    """Forget-gate attention of a sequence that stands alone: q [B, T, H, D], k, v [B, T, Hkv, D], log_gate [B, T, H].

    Keys are those of the queries themselves: the kernel cannot take a memory of earlier blocks beside them.
    """
    attend = _load("fla.ops.forgetting_attn", "parallel_forgetting_attn")
    return attend(q, k, v, log_gate)
