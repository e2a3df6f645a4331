"""Which memories matter to which queries, found on the device without ever waiting for it.

Every memory is seen by one contiguous range of queries: from the first one at or after its birth to the last one before
its death. So memories are sorted by *how long* they live, stably, into a few classes (immortal, then each length twice
the next, then never seen), and cut into tiles of `block_n`. Inside a class, births are in order and lives are of like
length; hence the living tiles of any query tile form one run of tiles per class, and a survivor among thousands of dead
neighbours sits in a tile full of survivors. Keys and values are copied into that order once, so that the attention
kernels read whole contiguous tiles.

The plan's size is linear in T and S: no list of pairs, no list of indices per query. Its passes:

    classify   first, last and first-fading query of each memory; its class; how many of each class per block
    place      where each (class, block) goes; classes start on a tile boundary
    scatter    `order`: which memory stands in which slot
    gather     keys, values and per-memory numbers into that order; the extent of each tile
    scan       running maximum of tile ends and minimum of fading starts, inside a class
    find_runs  per query tile and class: runs of fully living tiles, and runs of tiles that need the mask
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

NUM_CLASSES = 16
SHORTEST = 128
"""Memories seen by at most this many queries share one class."""
BLOCK = 1024
"""Memories per program while building."""
RUN_WORDS = 128
"""Words of one query tile's entry in `runs`: counts, then (start, length) of full runs, then of masked runs."""

CLASSES = tl.constexpr(NUM_CLASSES)
DEAD = tl.constexpr(NUM_CLASSES - 1)
FIRST_LIMIT = tl.constexpr(SHORTEST)
WORDS = tl.constexpr(RUN_WORDS)
FULL_AT = tl.constexpr(2)
MASKED_AT = tl.constexpr(2 + 2 * NUM_CLASSES)
FAR = tl.constexpr(1 << 30)
"""Relative positions are clamped to +-FAR, so that ages fit 32 bits."""
NEVER = tl.constexpr(2**31 - 1)


@dataclass(frozen=True)
class Plan:
    """The sorted memories of every row, and the runs of tiles of every query tile. R rows = B x (1 or Hkv)."""

    order: Tensor
    """Which memory stands in a slot, or -1: int32 [R, slots]."""
    keys: Tensor
    """Per slot: first query, query after the last, position relative to the row's first query: int32 [R, 3, slots]."""
    spans: Tensor
    """Per slot: span: float32 [R, slots]."""
    tiles: Tensor
    """Per tile: smallest and largest first query, largest end, smallest fading start: int32 [R, 4, slots / block_n]."""
    class_tiles: Tensor
    """First tile of each class, and the tile after the last: int32 [R, NUM_CLASSES + 1]."""
    runs: Tensor
    """Per query tile: its runs: int32 [R, query tiles, RUN_WORDS]."""
    k: Tensor
    """Keys in slot order [B, Hkv, slots, D]."""
    v: Tensor
    """Values in slot order [B, Hkv, slots, D]."""


def num_slots(memories: int, queries: int, block_n: int) -> int:
    """Slots that are enough for any spans: each class that can occur may leave one tile partly empty."""
    lengths = max(0, (max(queries, 1) - 1) // SHORTEST).bit_length() + 1
    classes = min(NUM_CLASSES, lengths + 2)
    return (-(-memories // block_n) + classes - 1) * block_n


@triton.jit
def _lower_bound(sorted_ptr, length, steps, target):
    """First index whose value is not below `target`."""
    low = tl.zeros_like(target).to(tl.int32)
    high = low + length
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        value = tl.load(sorted_ptr + middle, mask=open_, other=0)
        right = open_ & (value < target)
        low = tl.where(right, middle + 1, low)
        high = tl.where(right, high, middle)
    return low


@triton.jit(do_not_specialize=["steps", "num_blocks"])
def _classify(
    k_pos, span, q_pos, k_doc, q_doc, ranges, label, counts, S, T, heads, steps, num_blocks,
    kp_b, kp_h, kp_s, sp_b, sp_h, sp_s, qp_b, ramp,
    MIN_AGE: tl.constexpr, HAS_DOCS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, h = row // heads, row % heads
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < S
    at = i.to(tl.int64)
    born = tl.load(k_pos + b * kp_b + h * kp_h + at * kp_s, mask=inside, other=0).to(tl.int64)
    length = tl.load(span + b * sp_b + h * sp_h + at * sp_s, mask=inside, other=0.0).to(tl.float32)
    whole = tl.floor(tl.minimum(length, 1.0e9)).to(tl.int64)
    life = tl.floor(tl.minimum(length + ramp, 1.0e9)).to(tl.int64) + 1
    queries = q_pos + b * qp_b
    first = _lower_bound(queries, T, steps, born + MIN_AGE)
    end = _lower_bound(queries, T, steps, born + life)
    fades = _lower_bound(queries, T, steps, born + whole + 1)
    last = tl.zeros_like(first) + T
    if HAS_DOCS:
        document = tl.load(k_doc + b * S + at, mask=inside, other=0)
        first = tl.maximum(first, _lower_bound(q_doc + b * T, T, steps, document))
        last = _lower_bound(q_doc + b * T, T, steps, document + 1)
        end = tl.minimum(end, last)
    dead = (end <= first) | (i >= S)
    first, end = tl.where(dead, 0, first), tl.where(dead, 0, end)
    fades = tl.minimum(fades, end)
    kind = tl.zeros_like(first) + (DEAD - 1)
    limit = FIRST_LIMIT
    for _ in tl.static_range(CLASSES - 3):
        kind -= (end - first > limit).to(tl.int32)
        limit = limit * 2
    kind = tl.where(end == last, 0, kind)
    kind = tl.where(dead, DEAD, kind)
    tl.store(ranges + (row * 3) * S + at, first, mask=inside)
    tl.store(ranges + (row * 3 + 1) * S + at, end, mask=inside)
    tl.store(ranges + (row * 3 + 2) * S + at, fades, mask=inside)
    tl.store(label + row * S + at, kind, mask=inside)
    for c in tl.static_range(CLASSES):
        count = tl.sum(((kind == c) & inside).to(tl.int32), 0)
        tl.store(counts + (row * CLASSES + c) * num_blocks + block, count)


@triton.jit(do_not_specialize=["num_blocks"])
def _place(counts, class_tiles, num_blocks, BLOCK_N: tl.constexpr, PIECE: tl.constexpr):
    """Turn counts into the first slot of each (class, block), in place."""
    row = tl.program_id(0).to(tl.int64)
    start = 0
    for c in range(CLASSES):
        tl.store(class_tiles + row * (CLASSES + 1) + c, start // BLOCK_N)
        here = start
        for piece in range(0, num_blocks, PIECE):
            block = piece + tl.arange(0, PIECE)
            at = counts + (row * CLASSES + c) * num_blocks + block
            count = tl.load(at, mask=block < num_blocks, other=0)
            tl.store(at, here + tl.cumsum(count, 0) - count, mask=block < num_blocks)
            here += tl.sum(count, 0)
        start = tl.cdiv(here, BLOCK_N) * BLOCK_N
    tl.store(class_tiles + row * (CLASSES + 1) + CLASSES, start // BLOCK_N)


@triton.jit(do_not_specialize=["num_blocks"])
def _scatter(label, counts, order, S, slots, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = block * BLOCK + tl.arange(0, BLOCK)
    kind = tl.load(label + row * S + i, mask=i < S, other=-1)
    slot = tl.zeros_like(i)
    for c in tl.static_range(CLASSES):
        mine = (kind == c).to(tl.int32)
        start = tl.load(counts + (row * CLASSES + c) * num_blocks + block)
        slot = tl.where(mine == 1, start + tl.cumsum(mine, 0) - 1, slot)
    tl.store(order + row * slots + slot, i, mask=i < S)


@triton.jit(do_not_specialize=["kv_heads"])
def _gather(
    k, v, order, ranges, k_pos, span, q_pos, class_tiles, k_out, v_out, keys, spans, tiles, S, slots, kv_heads, heads,
    k_b, k_h, k_s, v_b, v_h, v_s, kp_b, kp_h, kp_s, sp_b, sp_h, sp_s, qp_b,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    row, row_head = b * heads + h % heads, h % heads  # heads is 1 or kv_heads
    if tile >= tl.load(class_tiles + row * (CLASSES + 1) + CLASSES):
        return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(order + row * slots + slot)
    used = index >= 0
    at = tl.maximum(index, 0).to(tl.int64)
    d = tl.arange(0, D_PAD)
    if tile < tl.load(class_tiles + row * (CLASSES + 1) + DEAD):
        taken = used[:, None] & (d[None, :] < D)
        out = (bh * slots + slot)[:, None] * D + d[None, :]
        rows = tl.load(k + b * k_b + h * k_h + at[:, None] * k_s + d[None, :], mask=taken, other=0.0)
        tl.store(k_out + out, rows, mask=d[None, :] < D)
        rows = tl.load(v + b * v_b + h * v_h + at[:, None] * v_s + d[None, :], mask=taken, other=0.0)
        tl.store(v_out + out, rows, mask=d[None, :] < D)
    if h < heads:
        first = tl.load(ranges + (row * 3) * S + at, mask=used, other=NEVER)
        end = tl.load(ranges + (row * 3 + 1) * S + at, mask=used, other=0)
        fades = tl.load(ranges + (row * 3 + 2) * S + at, mask=used, other=NEVER)  # padding hides no full tile
        born = tl.load(k_pos + b * kp_b + row_head * kp_h + at * kp_s, mask=used, other=0).to(tl.int64)
        born = tl.minimum(tl.maximum(born - tl.load(q_pos + b * qp_b).to(tl.int64), -FAR), FAR).to(tl.int32)
        length = tl.load(span + b * sp_b + row_head * sp_h + at * sp_s, mask=used, other=0.0).to(tl.float32)
        tl.store(keys + (row * 3) * slots + slot, first)
        tl.store(keys + (row * 3 + 1) * slots + slot, end)
        tl.store(keys + (row * 3 + 2) * slots + slot, born)
        tl.store(spans + row * slots + slot, length)
        num_tiles = slots // BLOCK_N
        tl.store(tiles + (row * 4) * num_tiles + tile, tl.min(first, 0))
        tl.store(tiles + (row * 4 + 1) * num_tiles + tile, tl.max(first, 0))
        tl.store(tiles + (row * 4 + 2) * num_tiles + tile, tl.max(end, 0))
        tl.store(tiles + (row * 4 + 3) * num_tiles + tile, tl.min(fades, 0))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["num_tiles"])
def _scan(tiles, scans, class_tiles, num_tiles, PIECE: tl.constexpr):
    """Inside one class: the largest end so far, and the smallest fading start from here on."""
    row, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    low = tl.load(class_tiles + row * (CLASSES + 1) + c)
    high = tl.load(class_tiles + row * (CLASSES + 1) + c + 1)
    best = 0
    pieces = tl.cdiv(high - low, PIECE)
    for n in range(pieces):
        tile = low + n * PIECE + tl.arange(0, PIECE)
        end = tl.load(tiles + (row * 4 + 2) * num_tiles + tile, mask=tile < high, other=0)
        end = tl.maximum(tl.associative_scan(end, 0, _larger), best)
        tl.store(scans + (row * 2) * num_tiles + tile, end, mask=tile < high)
        best = tl.maximum(best, tl.max(end, 0))
    least = NEVER
    for n in range(pieces):
        tile = low + (pieces - 1 - n) * PIECE + tl.arange(0, PIECE)
        fades = tl.load(tiles + (row * 4 + 3) * num_tiles + tile, mask=tile < high, other=NEVER)
        fades = tl.minimum(tl.associative_scan(fades, 0, _smaller, reverse=True), least)
        tl.store(scans + (row * 2 + 1) * num_tiles + tile, fades, mask=tile < high)
        least = tl.minimum(least, tl.min(fades, 0))


@triton.jit
def _partition_point(values, low, high, steps, bound):
    """First index in [low, high) whose value is at least `bound`; values never fall there."""
    for _ in range(steps):
        middle = (low + high) // 2
        right = (low < high) & (tl.load(values + middle, mask=low < high, other=0) < bound)
        stop = low < high
        high = tl.where(stop & (right == 0), middle, high)
        low = tl.where(right, middle + 1, low)
    return low


@triton.jit
def _store_runs(at, start, length, rank_from):
    """Write the non-empty runs one after the other; the number of runs written."""
    some = (length > 0).to(tl.int32)
    rank = rank_from + tl.cumsum(some, 0) - 1
    tl.store(at + 2 * rank, start, mask=some == 1)
    tl.store(at + 2 * rank + 1, length, mask=some == 1)
    return rank_from + tl.sum(some, 0)


@triton.jit(do_not_specialize=["num_tiles", "steps"])
def _find_runs(tiles, scans, class_tiles, runs, T, num_tiles, steps, BLOCK_M: tl.constexpr):
    row, qt = tl.program_id(1).to(tl.int64), tl.program_id(0)
    q0 = qt * BLOCK_M
    q1 = tl.minimum(q0 + BLOCK_M, T)
    c = tl.arange(0, CLASSES)
    start = tl.load(class_tiles + row * (CLASSES + 1) + c)
    stop = tl.load(class_tiles + row * (CLASSES + 1) + c + 1)
    stop = tl.where(c == DEAD, start, stop)
    tiles += row * 4 * num_tiles
    scans += row * 2 * num_tiles
    high = _partition_point(tiles, start, stop, steps, q1)  # tiles born before the query tile ends
    low = _partition_point(scans, start, high, steps, q0 + 1)  # all before are dead
    full_high = _partition_point(tiles + num_tiles, low, high, steps, q0 + 1)  # all before are wholly born
    full_low = _partition_point(scans + num_tiles, low, full_high, steps, q1)  # none from here on fades
    out = runs + (row * tl.num_programs(0) + qt) * WORDS
    _store_runs(out + FULL_AT, full_low, full_high - full_low, 0)
    older = _store_runs(out + MASKED_AT, low, full_low - low, 0)
    _store_runs(out + MASKED_AT, full_high, high - full_high, older)
    tl.store(out, tl.sum(full_high - full_low, 0))
    tl.store(out + 1, tl.sum(high - low - (full_high - full_low), 0))


def build_plan(
    k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, q_doc: Tensor | None, k_doc: Tensor | None,
    *, ramp: float, include_self: bool, block_m: int, block_n: int,
) -> Plan:  # fmt: skip
    """Sort the memories by length of life and find the runs of every query tile. See the module's docstring."""
    (batch, kv_heads, memories, dim), queries, heads = k.shape, q_pos.shape[-1], span.shape[1]
    rows, slots = batch * heads, num_slots(memories, queries, block_n)
    num_tiles, num_blocks = slots // block_n, max(1, triton.cdiv(memories, BLOCK))
    like = dict(device=k.device, dtype=torch.int32)
    ranges, label = torch.empty(rows, 3, memories, **like), torch.empty(rows, memories, **like)
    counts, class_tiles = torch.empty(rows, NUM_CLASSES, num_blocks, **like), torch.empty(rows, NUM_CLASSES + 1, **like)
    order = torch.full((rows, slots), -1, **like)
    keys, spans = torch.empty(rows, 3, slots, **like), torch.empty(rows, slots, device=k.device)
    tiles, scans = torch.empty(rows, 4, num_tiles, **like), torch.empty(rows, 2, num_tiles, **like)
    query_tiles = triton.cdiv(queries, block_m)
    runs = torch.empty(rows, query_tiles, RUN_WORDS, **like)
    k_out, v_out = k.new_empty(batch, kv_heads, slots, dim), v.new_empty(batch, kv_heads, slots, dim)

    where = (*k_pos.stride(), *span.stride(), q_pos.stride(0))
    documents = (k_doc, q_doc) if k_doc is not None else (k_pos, q_pos)
    _classify[(rows, num_blocks)](
        k_pos, span, q_pos, *documents, ranges, label, counts, memories, queries, heads, queries.bit_length(), num_blocks,
        *where, ramp, MIN_AGE=0 if include_self else 1, HAS_DOCS=k_doc is not None, BLOCK=BLOCK,
    )  # fmt: skip
    _place[(rows,)](
        counts, class_tiles, num_blocks, BLOCK_N=block_n, PIECE=triton.next_power_of_2(min(num_blocks, 1024))
    )
    _scatter[(rows, num_blocks)](label, counts, order, memories, slots, num_blocks, BLOCK=BLOCK)
    _gather[(num_tiles, batch * kv_heads)](
        k, v, order, ranges, k_pos, span, q_pos, class_tiles, k_out, v_out, keys, spans, tiles, memories, slots, kv_heads,
        heads, *k.stride()[:3], *v.stride()[:3], *where,
        D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK_N=block_n,
    )  # fmt: skip
    _scan[(rows, NUM_CLASSES - 1)](
        tiles, scans, class_tiles, num_tiles, PIECE=triton.next_power_of_2(min(num_tiles, 1024))
    )
    _find_runs[(query_tiles, rows)](
        tiles, scans, class_tiles, runs, queries, num_tiles, num_tiles.bit_length(), BLOCK_M=block_m
    )
    return Plan(order, keys, spans, tiles, class_tiles, runs, k_out, v_out)
