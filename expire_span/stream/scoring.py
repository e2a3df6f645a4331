"""Bits per byte of any file, read in blocks: what is held is bounded by what lives."""

from __future__ import annotations

import math
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder

from .prompts import GPU_BLOCK, PROMPT_BLOCK


@torch.inference_mode()
def score_bytes(decoder: Decoder, file: BinaryIO) -> dict[str, Any]:
    """Score a file of bytes as one stream. The first byte has nothing before it and is not scored."""
    decoder.eval()
    device = decoder.embed.weight.device
    size = GPU_BLOCK if device.type == "cuda" else PROMPT_BLOCK
    last, state, count, held = b"", None, 0, 0
    loss = torch.zeros((), dtype=torch.float64, device=device)
    live: Tensor | None = None
    while block := file.read(size):
        tokens = torch.frombuffer(bytearray(last + block), dtype=torch.uint8).to(device, torch.int64)
        if len(tokens) > 1:
            logits, state, aux = decoder(tokens[None, :-1], state)
            loss += F.cross_entropy(logits[0].float(), tokens[1:], reduction="sum")
            live = aux.live * (len(tokens) - 1) + (0 if live is None else live)
            count, held = count + len(tokens) - 1, max(held, aux.bytes_held)
        last = block[-1:]
    if not count:
        raise ValueError(f"a file to score must hold at least 2 bytes, got {len(last)}")
    assert live is not None
    means = (live / count).tolist()
    return {
        "bytes": count + 1,
        "bits_per_byte": loss.item() / count / math.log(2),
        "live": means,
        "most_bytes_held": held,
    }
