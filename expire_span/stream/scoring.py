"""Bits per byte (token, character, word) of a file, read as one stream in blocks; memory is bounded by the living memories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.tasks.contract import Codec

from .prompts import PROMPT_BLOCK

GPU_SCORED_BLOCK = 16_384
"""Bytes or tokens in one forward pass on a GPU."""
STRETCHES = 64
"""Least number of stretches into which a long stream's report is divided; there are at most twice as many."""


Progress = Callable[[int], None]
"""Called after each block with the number of tokens read so far."""


def score_file(
    decoder: Decoder, codec: Codec, file: BinaryIO, source: str = "the file", progress: Progress | None = None
) -> dict[str, Any]:
    """Score a file as one stream of the codec's tokens. The first one has nothing before it and is not scored.

    Files of bytes are never in memory as a whole.
    """
    if codec.unit == "byte":
        sizes, blocks = None, lambda size: map(codec.encode, iter(lambda: file.read(size), b""))
    else:
        ids, sizes = codec.measure(file.read(), source)
        blocks = lambda size: (ids[start : start + size] for start in range(0, len(ids), size))  # noqa: E731
    total, unit = _score(decoder, blocks, progress), codec.unit
    if not total.scored:
        raise ValueError(f"a file to score must hold at least 2 {unit}s, got {total.seen}")
    scores = {f"{unit}s": total.seen, f"bits_per_{unit}": total.bits / total.scored}
    if sizes is not None:
        scores |= {"bytes": int(sizes.sum()), "bits_per_byte": total.bits / int(sizes[1:].sum())}
    return {**scores, **total.memory()}


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
def _score(decoder: Decoder, blocks: Callable[[int], Iterable[np.ndarray]], progress: Progress | None) -> _Total:
    """Score every token but the first. `blocks(size)` gives the stream's tokens in blocks of at most `size`."""
    decoder.eval()
    device = decoder.embed.weight.device
    total, state = _Total(), None
    last = torch.zeros(0, dtype=torch.int64, device=device)
    for block in blocks(GPU_SCORED_BLOCK if device.type == "cuda" else PROMPT_BLOCK):
        tokens = torch.cat([last, torch.from_numpy(block.astype(np.int64)).to(device)])
        last, total.seen = tokens[-1:], total.seen + len(block)
        if len(tokens) > 1:
            logits, state, aux = decoder(tokens[None, :-1], state)
            loss = F.cross_entropy(logits[0].float(), tokens[1:], reduction="sum")
            total.add(_Stretch(len(tokens) - 1, loss.double(), aux.live.double() * (len(tokens) - 1)))
            total.held = max(total.held, aux.bytes_held)
        if progress is not None:
            progress(total.seen)
    return total
