"""Kernels of flash-linear-attention (`fla-core`) for rivals on a GPU: which layer may use them. See `fla_kernels.py`.

The package is an extra (`pip install 'expire-span[fla]'`).
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Literal

import torch

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
