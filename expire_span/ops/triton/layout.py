"""How a plan is laid out in memory: its constants, its sizes, and the tensors that hold it. `lists.py` builds it.

All integers of a row are stored in one array of 32-bit words, because every further tensor would cost host time. A slot is the place
of one memory in sorted order, a tile `block_n` neighbouring slots. A row holds, in this order (the functions `..._at` below give the
addresses, so that no kernel computes them by itself):

    class tiles   HEAD_WORDS        the first tile of each class, then the number of tiles
    order         slots             index of the memory in each slot, or -1
    first         slots             the first query that sees the slot's memory
    end           slots             the query after the last one that sees it
    fates         2 x slots         birth, and span as float32 bits, next to each other
    extents       4 x tiles         of each tile: the first query that sees any of it; the first query at which all of it is born;
                                    the query after the last; the first query at which any of it is on its ramp
    entries       1 x query tiles   of each query tile: its runs of memory tiles, the position of its first query, and the steps of
                                    its queries since that position
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

NUM_CLASSES = 16
SHORTEST = 128
"""Memories that are seen by at most this many queries form one class."""
HEAD_WORDS = 32
"""Words before `order` in a row of the plan; they hold the class tiles."""
RUN_WORDS = 128
"""Words of a query tile's entry before its queries: two counts, (start, length) of full runs, then of masked runs, position."""

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
    """The sorted memories of every row, and the runs of memory tiles that every query tile reads.

    R = B x P rows, where P in 1..Hkv is the number of rows of spans per batch row.
    """

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
        """Index of the memory in each slot, or -1: [R, slots]."""
        return self.words[:, HEAD_WORDS : HEAD_WORDS + self.k.shape[2]]

    @property
    def births(self) -> Tensor:
        """The birth of each slot's memory, in steps since the first query: [R, slots]."""
        slots = self.k.shape[2]
        return self.words[:, HEAD_WORDS + 3 * slots : HEAD_WORDS + 5 * slots : 2]

    def entries(self, block_m: int, block_n: int) -> Tensor:
        """Per query tile, its runs, its first query's position, and each query's steps since that one (float32 bits).

        [R, query tiles, RUN_WORDS + block_m]
        """
        size = RUN_WORDS + block_m
        entries = self.words[:, words_before_entries(self.k.shape[2], block_n) :]
        return entries[:, : entries.shape[1] // size * size].unflatten(1, (-1, size))


def strides(x: Tensor) -> tuple[int, ...]:
    """Strides of x [n], [B, n] or [B, heads, n] by batch row, head and item; 0 for a dimension that x does not have."""
    found = x.stride()
    if len(found) == 3:
        return found if x.shape[1] > 1 else (found[0], 0, found[2])
    return (found[0], 0, found[1]) if len(found) == 2 else (0, 0, found[0])


def num_heads(span: Tensor, k_pos: Tensor) -> int:
    """Number of rows of spans or positions per batch row, 1..Hkv. Heads beyond them share the last row."""
    return max(span.shape[1] if span.dim() == 3 else 1, k_pos.shape[1] if k_pos.dim() == 3 else 1)


def power_of_2(n: int) -> int:
    """The next power of 2 from n on. Triton's own function, which kernels may call as well, takes twenty times as long."""
    return 1 << (n - 1).bit_length()


def num_slots(memories: int, queries: int, block_n: int) -> int:
    """Number of slots that is enough for any spans, where each class may leave one tile partly empty; an even number of tiles."""
    lengths = max(0, (max(queries, 1) - 1) // SHORTEST).bit_length() + 1
    classes = min(NUM_CLASSES, lengths + 2)
    tiles = -(-memories // block_n) + classes - 1
    return (tiles + 1) // 2 * 2 * block_n


def words_before_entries(slots: int, block_n: int) -> int:
    """Words of a row before the entries of query tiles: class tiles, order, first, end, fates (two a slot), extents."""
    return HEAD_WORDS + 5 * slots + 4 * (slots // block_n)


def num_words(slots: int, queries: int, block_m: int, block_n: int) -> int:
    """Words of one row of a plan: a multiple of 16, so that the kernels read several at once."""
    words = words_before_entries(slots, block_n) + -(-queries // block_m) * (RUN_WORDS + block_m)
    return -(-words // 16) * 16


@triton.jit
def order_at(words):
    """Address of the memory index of each slot. In all of these functions, `words` is the address of the row."""
    return words + HEAD


@triton.jit
def first_at(words, slots):
    """Address of the first query that sees each slot's memory."""
    return words + HEAD + slots


@triton.jit
def end_at(words, slots):
    """Address of the query after the last one that sees each slot's memory."""
    return words + HEAD + 2 * slots


@triton.jit
def fates_at(words, slots):
    """Address of pairs of words, one pair per slot: birth, and span as float32 bits."""
    return words + HEAD + 3 * slots


@triton.jit
def extents_at(words, slots):
    """Address of the tiles' extents, four numbers per tile: the first number of all tiles, then the second, and so on."""
    return words + HEAD + 5 * slots


@triton.jit
def entry_at(words, qt, slots, num_tiles, PLAN_M: tl.constexpr):
    """Address of the entry of query tile `qt`. It is even, so that pairs of words are read in one load."""
    num_extents = tl.multiple_of(4 * num_tiles, 2)
    return extents_at(words, slots) + num_extents + qt * (WORDS + PLAN_M)
