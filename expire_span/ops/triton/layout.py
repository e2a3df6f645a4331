"""How a plan lies in memory: its constants, its sizes, and the tensors that hold it. `lists.py` builds it.

All integers of a row lie in one stretch of `words`, one after the other, since every tensor costs the host time:
class_tiles, order, first, end, fates (birth, and span + ramp as float32 bits, side by side), tiles, entries of query tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton.language as tl
from torch import Tensor

NUM_CLASSES = 16
SHORTEST = 128
"""Memories seen by at most this many queries share one class."""
HEAD_WORDS = 32
"""Words before `order` in a row of the plan; they hold class_tiles."""
RUN_WORDS = 128
"""Words of a query tile's entry before its queries: counts, (start, length) of full runs, then of masked runs, position."""

CLASSES = tl.constexpr(NUM_CLASSES)
DEAD = tl.constexpr(NUM_CLASSES - 1)
HEAD = tl.constexpr(HEAD_WORDS)
WORDS = tl.constexpr(RUN_WORDS)
FULL_AT = tl.constexpr(2)
MASKED_AT = tl.constexpr(2 + 2 * NUM_CLASSES)
POSITION_AT = tl.constexpr(2 + 6 * NUM_CLASSES)
FAR = tl.constexpr(1 << 30)
"""Relative positions are clamped to +-FAR, so that ages fit 32 bits."""
NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Plan:
    """The sorted memories of every row, and the runs of tiles of every query tile. R rows = B x the rows of spans (1..Hkv)."""

    words: Tensor
    """Every integer of the plan: int32 [R, num_words(...)]. The properties below are views of it."""
    k: Tensor
    """Keys in slot order [B, Hkv, slots, D]."""
    v: Tensor
    """Values in slot order [B, Hkv, slots, D]."""
    min_age: int = 0
    """The youngest age that is seen: 0 or 1."""

    @property
    def class_tiles(self) -> Tensor:
        """First tile of each class, and the tile after the last: [R, NUM_CLASSES + 1]."""
        return self.words[:, : NUM_CLASSES + 1]

    @property
    def order(self) -> Tensor:
        """Which memory stands in a slot, or -1: [R, slots]."""
        return self.words[:, HEAD_WORDS : HEAD_WORDS + self.k.shape[2]]

    def entries(self, block_m: int, block_n: int) -> Tensor:
        """Per query tile, its runs, its first query's position, and each query's steps since that one (float32 bits).

        [R, query tiles, RUN_WORDS + block_m]
        """
        slots, size = self.k.shape[2], RUN_WORDS + block_m
        entries = self.words[:, HEAD_WORDS + 5 * slots + 4 * (slots // block_n) :]
        return entries[:, : entries.shape[1] // size * size].unflatten(1, (-1, size))


def strides(x: Tensor) -> tuple[int, ...]:
    """Of batch rows, heads and items, of x [n], [B, n] or [B, heads, n]: 0 where one serves all."""
    found = x.stride()
    if len(found) == 3:
        return found if x.shape[1] > 1 else (found[0], 0, found[2])
    return (found[0], 0, found[1]) if len(found) == 2 else (0, 0, found[0])


def num_heads(span: Tensor, k_pos: Tensor) -> int:
    """Rows of spans or positions that a batch row has: 1..Hkv. Heads beyond them share the last."""
    return max(span.shape[1] if span.dim() == 3 else 1, k_pos.shape[1] if k_pos.dim() == 3 else 1)


def power_of_2(n: int) -> int:
    """The next one. Triton's function of this kind may be called in kernels too, at twenty times the cost."""
    return 1 << (n - 1).bit_length()


def num_slots(memories: int, queries: int, block_n: int) -> int:
    """Slots that are enough for any spans: each class that can occur may leave one tile partly empty. Whole pairs of tiles."""
    lengths = max(0, (max(queries, 1) - 1) // SHORTEST).bit_length() + 1
    classes = min(NUM_CLASSES, lengths + 2)
    tiles = -(-memories // block_n) + classes - 1
    return (tiles + 1) // 2 * 2 * block_n


def num_words(slots: int, queries: int, block_m: int, block_n: int) -> int:
    """Words of one row of a plan: a multiple of 16, so that the kernels read several at once."""
    words = HEAD_WORDS + 5 * slots + 4 * (slots // block_n) + -(-queries // block_m) * (RUN_WORDS + block_m)
    return -(-words // 16) * 16
