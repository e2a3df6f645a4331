"""Decides whether a layer uses kernels of flash-linear-attention (`fla-core`) or plain PyTorch; `fla_kernels.py` calls them.

`gated_deltanet` and `forgetting` have such kernels, for GPUs. The package is an extra (`fla`).
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from importlib import metadata
from typing import Literal

import torch

from expire_span.extras import install_command

Kernels = Literal["auto", "torch", "fla"]
LEAST_COUNT = 16
"""Blocks of fewer steps than this, decoding among them, run in plain PyTorch: fla's kernels work in chunks of 64."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SOUND_CHANNELS = 128
"""Triton 3.4 to 3.7.0 miscompiles fla's backward pass of the gated delta rule on Hopper GPUs (flash-linear-attention issue
640). Only tiles of this many channels of keys and values are known to be right. With keys of 32, for example, gradients are
wrong whenever fla's autotuner chooses four warps, which depends on what else the GPU does."""
_INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("fla", "einops", "triton"))
_TRITON = tuple(int(part) for part in re.findall(r"\d+", metadata.version("triton"))[:3]) if _INSTALLED else ()
_warned: set[str] = set()
"""The reasons for a fallback on a GPU that the user has already been told."""


def resolve_kernels(
    impl: Kernels,
    kind: str,
    device: torch.device,
    dtype: torch.dtype | None = None,
    count: int | None = None,
    channels: int | None = None,
) -> Literal["torch", "fla"]:
    """Resolve `impl` for a layer of system `kind`; "auto" takes fla's kernels where they can run, else plain PyTorch.

    Blocks that are too short for a kernel always run in PyTorch. Where "auto" falls back on a GPU for another reason, it warns
    once per reason.

    Args:
        dtype, count: of the block to compute, None where not known yet; count is its number of steps.
        channels: of a key or a value of the gated delta rule, whichever has fewer; None for other systems.
    """
    if impl == "torch" or (impl == "auto" and device.type != "cuda") or (count is not None and count < LEAST_COUNT):
        return "torch"
    obstacle = _find_obstacle(device, dtype) or find_miscompiled(device, channels)
    if obstacle is None:
        return "fla"
    if impl == "fla":
        raise ValueError(f"{kind} with impl='fla' {obstacle}; use impl='torch' or impl='auto'")
    _warn_once(kind, obstacle)
    return "torch"


def _find_obstacle(device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Why fla's kernels cannot run here, as the rest of a sentence that begins with "impl='fla'"; None if they can."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {device.type}"
    if not _INSTALLED:
        return f"needs the package fla-core, which is not installed ({install_command('fla')})"
    if dtype is not None and dtype not in DTYPES:
        return f"serves bfloat16, float16 and float32, got {str(dtype).removeprefix('torch.')}"
    return None


def tile_of(channels: int) -> int:
    """Channels in one tile of the backward pass on a Hopper GPU: a power of two, from 16 to 128."""
    return min(max(1 << (channels - 1).bit_length(), 16), 128)


def find_miscompiled(device: torch.device, channels: int | None) -> str | None:
    """Why fla's kernel is wrong for keys or values of so many channels, as `_find_obstacle` says it; None if it is right."""
    if channels is None or tile_of(channels) == SOUND_CHANNELS or not (3, 4) <= _TRITON < (3, 7, 1):
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    version = ".".join(map(str, _TRITON))
    return f"computes wrong gradients for keys or values of up to 64 channels with Triton {version} on this GPU, got {channels}"


def _warn_once(kind: str, obstacle: str) -> None:
    reason = f"{kind} runs in plain PyTorch on this GPU, because impl='fla' {obstacle}"
    if reason in _warned or torch.compiler.is_compiling():
        return
    _warned.add(reason)
    warnings.warn(reason, stacklevel=4)
