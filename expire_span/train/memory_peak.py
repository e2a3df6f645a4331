"""Peak memory of training."""

from __future__ import annotations

import torch


def forget_peak() -> None:
    """Reset a GPU's peak, so that later readings cover training only; the host's peak cannot be reset."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """Peak memory of this process: of the GPU where one is in use, else of the host."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes here, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
