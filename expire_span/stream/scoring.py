"""Bits per byte of a file of any length, read as one stream in blocks; memory is bounded by the living memories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder

from .prompts import PROMPT_BLOCK

GPU_SCORED_BLOCK = 16_384
"""Bytes or tokens in one forward pass on a GPU."""
STRETCHES = 64
"""Least number of stretches into which a long stream's report is divided; there are at most twice as many."""


Progress = Callable[[int], None]
"""Called after each block with the number of bytes or tokens read so far."""


def score_bytes(decoder: Decoder, file: BinaryIO, progress: Progress | None = None) -> dict[str, Any]:
    """Score a file of bytes as one stream. The first byte has nothing before it and is not scored."""

    def blocks(size: int) -> Iterator[Tensor]:
        while block := file.read(size):
            yield torch.frombuffer(bytearray(block), dtype=torch.uint8)

    total = _score(decoder, blocks, progress)
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 bytes, got {total.seen}")
    return {"bytes": total.seen, "bits_per_byte": total.bits / total.scored, **total.memory()}


def score_tokens(
    decoder: Decoder, ids: np.ndarray, sizes: np.ndarray, progress: Progress | None = None
) -> dict[str, Any]:
    """The same for tokens that stand for `sizes` bytes each; those of the first token are not scored."""
    total = _score(decoder, lambda size: iter(torch.from_numpy(ids).split(size)), progress)
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 tokens, got {total.seen}")
    scores = {"bits_per_token": total.bits / total.scored, "bits_per_byte": total.bits / int(sizes[1:].sum())}
    return {"bytes": int(sizes.sum()), "tokens": total.seen, **scores, **total.memory()}


def score_characters(decoder: Decoder, ids: np.ndarray, progress: Progress | None = None) -> dict[str, Any]:
    """The same for tokens that stand for one character each."""
    total = _score(decoder, lambda size: iter(torch.from_numpy(ids).split(size)), progress)
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 characters, got {total.seen}")
    return {"characters": total.seen, "bits_per_character": total.bits / total.scored, **total.memory()}


@dataclass
class _Stretch:
    """A run of consecutive scored tokens: their number, and the sums of their loss (nats) and of each layer's living
    memories."""

    count: int
    loss: Tensor
    live: Tensor

    def join(self, other: _Stretch) -> _Stretch:
        return _Stretch(self.count + other.count, self.loss + other.loss, self.live + other.live)

    def describe(self, begin: int) -> dict[str, Any]:
        bits, live = float(self.loss) / math.log(2) / self.count, (self.live / self.count).tolist()
        return {"from": begin, "to": begin + self.count, "bits": bits, "live": live}


@dataclass
class _Total:
    """Sums over a stream as it is read, in at most 2 * STRETCHES stretches however long it is."""

    seen: int = 0
    held: int = 0
    blocks: int = 1
    """Number of blocks per stretch; it is doubled, and neighbouring stretches are merged, when there are too many stretches."""
    stretches: list[_Stretch] = field(default_factory=list)
    newest: int = 0
    """Number of blocks in the newest stretch so far."""

    def add(self, block: _Stretch) -> None:
        if self.stretches and self.newest < self.blocks:
            self.stretches[-1], self.newest = self.stretches[-1].join(block), self.newest + 1
            return
        if len(self.stretches) == 2 * STRETCHES:
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches, self.blocks = [a.join(b) for a, b in pairs], self.blocks * 2
        self.stretches.append(block)
        self.newest = 1

    @property
    def scored(self) -> int:
        return sum(stretch.count for stretch in self.stretches)

    @property
    def bits(self) -> float:
        return float(torch.stack([stretch.loss for stretch in self.stretches]).sum()) / math.log(2)

    def memory(self) -> dict[str, Any]:
        """Mean living memories of each layer, the largest number of bytes held, and the report of each stretch."""
        live = (torch.stack([stretch.live for stretch in self.stretches]).sum(0) / self.scored).tolist()
        begins = accumulate((stretch.count for stretch in self.stretches), initial=0)
        along = [stretch.describe(begin) for stretch, begin in zip(self.stretches, begins, strict=False)]
        return {"live": live, "peak_bytes_per_row": self.held, "along": along}


@torch.inference_mode()
def _score(decoder: Decoder, blocks: Callable[[int], Iterator[Tensor]], progress: Progress | None) -> _Total:
    """Score every token but the first. `blocks(size)` yields the stream's tokens in blocks of at most `size`."""
    decoder.eval()
    device = decoder.embed.weight.device
    total, state = _Total(), None
    last = torch.zeros(0, dtype=torch.int64, device=device)
    for block in blocks(GPU_SCORED_BLOCK if device.type == "cuda" else PROMPT_BLOCK):
        tokens = torch.cat([last, block.to(device, torch.int64)])
        last, total.seen = tokens[-1:], total.seen + len(block)
        if len(tokens) > 1:
            logits, state, aux = decoder(tokens[None, :-1], state)
            loss = F.cross_entropy(logits[0].float(), tokens[1:], reduction="sum")
            total.add(_Stretch(len(tokens) - 1, loss.double(), aux.live.double() * (len(tokens) - 1)))
            total.held = max(total.held, aux.bytes_held)
        if progress is not None:
            progress(total.seen)
    return total
