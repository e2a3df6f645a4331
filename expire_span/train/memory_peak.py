"""The most memory that training has held."""

from __future__ import annotations

import torch


def forget_peak() -> None:
    """Measure a GPU's peak anew, so that it is that of training alone; the host's cannot be reset."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most memory this process has held: the GPU's where one is in use, else the host's."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    import resource
    import sys

    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes here, Linux kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
