"""A check that a stream's rows fit into the device's memory."""

from __future__ import annotations

import os

import torch

from expire_span.models.decoder import Decoder
from expire_span.store.slots import FRESH, ROUND


def bytes_per_row(decoder: Decoder) -> int:
    """Least number of bytes that one row occupies: its fresh slots, the smallest number of older slots, and its logits."""
    c, element = decoder.config, decoder.embed.weight.element_size()
    slot = 2 * c.head_dim * element + 8
    return c.layers * c.num_kv_heads * (FRESH + ROUND) * slot + 8 * c.vocab


def free_bytes(device: torch.device) -> int | None:
    """Bytes that are free on a device, or None where the system does not report it."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def check_room(decoder: Decoder, rows: int) -> None:
    """Refuse more rows than fit into the free memory of the decoder's device."""
    each, free = bytes_per_row(decoder), free_bytes(decoder.embed.weight.device)
    if free is not None and rows * each > free:
        raise ValueError(
            f"{rows} rows need at least {rows * each / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB are free; "
            f"take at most {free // each} rows"
        )
