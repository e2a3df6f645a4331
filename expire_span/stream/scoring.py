"""Bits per byte of any file, read in blocks: what is remembered is bounded by what lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder

from .prompts import GPU_BLOCK, PROMPT_BLOCK


def score_bytes(decoder: Decoder, file: BinaryIO) -> dict[str, Any]:
    """Score a file of bytes as one stream. The first byte has nothing before it and is not scored."""

    def blocks(size: int) -> Iterator[Tensor]:
        while block := file.read(size):
            yield torch.frombuffer(bytearray(block), dtype=torch.uint8)

    total = _score(decoder, blocks)
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 bytes, got {total.seen}")
    return {"bytes": total.seen, "bits_per_byte": total.bits / total.scored, **total.memory()}


def score_tokens(decoder: Decoder, ids: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    """The same for tokens that stand for `sizes` bytes each; those of the first token are not scored."""
    total = _score(decoder, lambda size: iter(torch.from_numpy(ids).split(size)))
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 tokens, got {total.seen}")
    scores = {"bits_per_token": total.bits / total.scored, "bits_per_byte": total.bits / int(sizes[1:].sum())}
    return {"bytes": int(sizes.sum()), "tokens": total.seen, **scores, **total.memory()}


@dataclass
class _Total:
    """What was found while a stream was read."""

    seen: int = 0
    scored: int = 0
    bits: float = 0.0
    live: Tensor | None = None
    held: int = 0

    def memory(self) -> dict[str, Any]:
        assert self.live is not None
        return {"live": (self.live / self.scored).tolist(), "most_bytes_held": self.held}


@torch.inference_mode()
def _score(decoder: Decoder, blocks: Callable[[int], Iterator[Tensor]]) -> _Total:
    """Read a stream in blocks of at most the size that `blocks` is asked for; every token but the first is scored."""
    decoder.eval()
    device = decoder.embed.weight.device
    total, state = _Total(), None
    loss = torch.zeros((), dtype=torch.float64, device=device)
    last = torch.zeros(0, dtype=torch.int64, device=device)
    for block in blocks(GPU_BLOCK if device.type == "cuda" else PROMPT_BLOCK):
        tokens = torch.cat([last, block.to(device, torch.int64)])
        last, total.seen = tokens[-1:], total.seen + len(block)
        if len(tokens) > 1:
            logits, state, aux = decoder(tokens[None, :-1], state)
            loss += F.cross_entropy(logits[0].float(), tokens[1:], reduction="sum")
            total.live = aux.live * (len(tokens) - 1) + (0 if total.live is None else total.live)
            total.scored, total.held = total.scored + len(tokens) - 1, max(total.held, aux.bytes_held)
    total.bits = loss.item() / math.log(2)
    return total
