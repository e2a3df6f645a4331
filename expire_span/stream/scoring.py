"""Bits per byte (token, character, word) of a file, read as one stream in blocks; memory is bounded by the living memories.

Several processes can read one file: each round of blocks is one sequence of a context group, with one block a process, and a
process keeps the memories of its own blocks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.ops.context import ContextGroup, context_parallel
from expire_span.tasks.contract import Codec

from .prompts import PROMPT_BLOCK

GPU_SCORED_BLOCK = 16_384
"""Bytes or tokens in one forward pass on a GPU."""
STRETCHES = 64
"""Least number of stretches into which a long stream's report is divided; there are at most twice as many."""


Progress = Callable[[int], None]
"""Called after each block with the number of tokens read so far."""


Take = Callable[[int], np.ndarray]
"""Gives the next tokens of a stream, at most this many; none at its end."""


def score_file(
    decoder: Decoder,
    codec: Codec,
    file: BinaryIO,
    source: str = "the file",
    progress: Progress | None = None,
    context: ContextGroup | None = None,
) -> dict[str, Any]:
    """Score a file as one stream of the codec's tokens. The first one has nothing before it and is not scored.

    Files of bytes are never in memory as a whole. context: processes that read the file together; each of them calls this with
    the same file and gets the same result.
    """
    if codec.unit == "byte":
        sizes, take = None, lambda count: codec.encode(file.read(count))
        length = 0 if context is None else os.fstat(file.fileno()).st_size
    else:
        ids, sizes = codec.measure(file.read(), source)
        take, length = _taker(ids), len(ids)
    if context is not None:
        context.check_equal("number of tokens in the file", length)
    total, unit = _score(decoder, take, progress, context, length), codec.unit
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


def _taker(ids: np.ndarray) -> Take:
    place = 0

    def take(count: int) -> np.ndarray:
        nonlocal place
        place += count
        return ids[place - count : place]

    return take


@torch.inference_mode()
def _score(
    decoder: Decoder, take: Take, progress: Progress | None, context: ContextGroup | None, length: int
) -> _Total:
    """Score every token but the first.

    In a context all processes begin by reading as many tokens alone as leave a number that they can divide.
    """
    decoder.eval()
    device = decoder.embed.weight.device
    total, state = _Total(), None
    last = torch.zeros(0, dtype=torch.int64, device=device)
    size = GPU_SCORED_BLOCK if device.type == "cuda" else PROMPT_BLOCK
    size, alone = (size, size) if context is None else (size * context.size, 1 + (length - 1) % context.size)
    block = take(alone)
    while len(block):
        tokens = torch.cat([last, torch.from_numpy(block.astype(np.int64)).to(device)])
        last, shared = tokens[-1:], context is not None and total.seen > 0
        total.seen += len(block)
        if len(tokens) > 1:
            read, state, held = _read(decoder, tokens, state, context if shared else None)
            if context is not None and context.rank > 0 and not shared:  # the first process keeps these memories
                state = decoder.reset_rows(state, torch.ones(1, dtype=torch.bool, device=device))
            total.add(read)
            total.held = max(total.held, held)
        if progress is not None:
            progress(total.seen)
        block = take(size)
    return total


def _read(
    decoder: Decoder, tokens: Tensor, state: Any, context: ContextGroup | None
) -> tuple[_Stretch, list[Any], int]:
    """Score all of `tokens` [n] but the first: their sums, the state after them, and the bytes held, over all processes."""
    x, y = tokens[None, :-1], tokens[None, 1:]
    if context is None:
        sums, state, held = _sums_of(decoder, x, y, state)
        return _Stretch(x.shape[1], sums[0], sums[1:]), state, held
    with context_parallel(context):
        sums, state, held = _sums_of(decoder, context.shard(x), context.shard(y), state)
    sums = torch.cat([sums, sums.new_tensor([held])])
    dist.all_reduce(sums, group=context.link.group)
    return _Stretch(x.shape[1], sums[0], sums[1:-1]), state, int(sums[-1])


def _sums_of(decoder: Decoder, x: Tensor, y: Tensor, state: Any) -> tuple[Tensor, list[Any], int]:
    """The sums of the loss and of each layer's living memories, [1 + layers] in float64, the state, and its bytes."""
    logits, state, aux = decoder(x, state)
    loss = F.cross_entropy(logits[0].float(), y[0], reduction="none").double().sum()
    return torch.cat([loss.view(1), aux.live.double() * x.shape[1]]), state, aux.bytes_held
