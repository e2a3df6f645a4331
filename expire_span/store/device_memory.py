"""Whether a device has enough memory, asked before anything is allocated."""

from __future__ import annotations

import os

import torch

from expire_span.disk.sizes import show_bytes
from expire_span.errors import UserError


def check_fits(need: int, what: str, settings: str, device: torch.device) -> None:
    """Refuse what needs more bytes than a device has, before anything is allocated."""
    have = device_bytes(device)
    if need > have:
        raise UserError(
            f"{what} ({settings}) needs at least {show_bytes(need)}, and {device} has {show_bytes(have)}; "
            "give smaller sizes"
        )


def device_bytes(device: torch.device) -> int:
    """Total bytes of memory of a GPU, or of the host."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
