"""A check that a stream's rows fit into the device's memory."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMORY_REPORT = Path("/proc/meminfo")
"""Where Linux says how much memory programs can still get."""


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a device, or None where the system does not report it."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:  # what the system would take back from its cache of files counts as free
        fields = dict(line.split(":", 1) for line in MEMORY_REPORT.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def check_room(device: torch.device, rows: int, each: int) -> None:
    """Refuse more rows, of at least `each` bytes, than fit into the free memory of the device."""
    free = free_bytes(device)
    if free is not None and rows * each > free:
        raise ValueError(
            f"{rows} rows need at least {rows * each / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free; "
            f"take at most {free // each} rows"
        )
