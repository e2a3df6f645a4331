"""The choice of an implementation for a call of the operator: "auto" is resolved here and nowhere else."""

from __future__ import annotations

import importlib.util
import os
import warnings
from typing import Literal, get_args

import torch

Impl = Literal["auto", "reference", "chunked", "triton"]

TRITON_HEAD_DIMS = (32, 64, 96, 128, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DECODE_QUERIES = 16
"""With at most this many queries per row, and without gradients, the decode kernel is used."""
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
_warned: set[str] = set()
"""The reasons for a fallback on a GPU of which the user has already been warned."""


def resolve_impl(
    impl: Impl,
    device: torch.device,
    *,
    causal: bool = True,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
) -> Impl:
    """Resolve "auto": triton on a GPU whose kernels support the call, chunked elsewhere. Any other `impl` is checked.

    A head_dim or dtype of None counts as supported. A fallback to chunked on a GPU warns, once per reason.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if device.type == "mps" and impl != "reference":
        raise ValueError(
            f"impl={impl!r} does not run on Apple's GPUs (device mps); move tensors to the CPU or use impl='reference'"
        )
    if impl in ("reference", "chunked"):
        return impl
    if impl == "auto" and device.type != "cuda":
        return "chunked"
    obstacle = _triton_obstacle(device, causal, head_dim, dtype)
    if obstacle is None:
        return "triton"
    if impl == "triton":
        raise ValueError(f"impl='triton' {obstacle}; use impl='chunked' or impl='auto'")
    _warn_once(obstacle)
    return "chunked"


def can_attend_in_segments(impl: Impl, device: torch.device, queries: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether `attend_in_segments` can be used: few queries, without gradients, on a GPU whose kernels support the call."""
    few = queries <= DECODE_QUERIES and not torch.is_grad_enabled()
    return few and resolve_impl(impl, device, head_dim=head_dim, dtype=dtype) == "triton"


def _triton_obstacle(device: torch.device, causal: bool, head_dim: int | None, dtype: torch.dtype | None) -> str | None:
    """Why the GPU kernels cannot run here, as the rest of a sentence that begins with "impl='triton'"; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda" and _capability(device) < (8, 0):
        major, minor = _capability(device)
        return f"needs compute capability 8.0 or higher, got {major}.{minor}"
    if not _TRITON_INSTALLED:
        return "needs the triton package, which is not installed"
    if head_dim is not None and head_dim not in TRITON_HEAD_DIMS:
        return f"serves head dims {', '.join(map(str, TRITON_HEAD_DIMS))}, got {head_dim}"
    if dtype is not None and dtype not in TRITON_DTYPES:
        return f"serves bfloat16, float16 and float32, got {str(dtype).removeprefix('torch.')}"
    if not causal:
        return "serves causal=True, got causal=False"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def _warn_once(obstacle: str) -> None:
    if obstacle in _warned or torch.compiler.is_compiling():
        return
    _warned.add(obstacle)
    warnings.warn(
        f"impl='auto' uses the slower impl='chunked' on this GPU, because impl='triton' {obstacle}", stacklevel=4
    )
