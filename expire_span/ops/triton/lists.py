"""Builds the plan: which memories each query tile must read. It is built on the device, without the host waiting for it.

Every memory is seen by one contiguous range of queries: from the first one at or after its birth to the last one before
its death. So memories are sorted stably into a few classes by how long they live (alive to the last query; then lives of up to
2**n x SHORTEST queries, from long to short; then never seen), and cut into tiles of `block_n`. A class with few members is
merged into the next longer one where that needs fewer tiles in all. Inside a class, births are in order and lives are of similar
length. So the living tiles of a query tile form one run per class with hardly a dead tile in it, and a memory that outlives
thousands of neighbours shares its tile with others that live as long. Keys and values are copied into that order once, so that
the attention kernels read whole contiguous tiles.

The plan's size is linear in T and S: there is no list of pairs and no list of indices per query. Its passes:

    classify   for each memory: the first and last query that see it, the first query at which it is on its ramp, its class; the
               number of members of each class per block of memories
    scatter    which classes are merged; `order`, the memory in each slot; every class starts on a tile boundary
    gather     keys, values and per-memory numbers are copied into that order; the extent of each tile
    find_runs  per query tile and class: runs of tiles of full weight, and runs of tiles that need the mask; and the positions of
               the tile's queries, so that the attention kernels need no q_pos
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import run_kernel
from .layout import (
    CLASSES,
    DEAD,
    FAR,
    FULL_AT,
    MASKED_AT,
    NEVER,
    NUM_CLASSES,
    POSITION_AT,
    SHORTEST,
    WORDS,
    Plan,
    end_at,
    entry_at,
    extents_at,
    fates_at,
    first_at,
    num_heads,
    num_slots,
    num_words,
    order_at,
    power_of_2,
    strides,
)
from .rule import lifetime

BLOCK = 1024
"""Number of memories per program in the passes that build the plan."""
FIRST_LIMIT = tl.constexpr(SHORTEST)
LARGEST_ID = tl.constexpr(2**63 - 1)


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


@triton.jit
def _scratch_row(scratch, row, S, num_blocks):
    """Address of one row of the scratch buffer: first, end, fades and class of each memory (4 x S), then the number of members per
    class and block."""
    return scratch + row * (4 * S + CLASSES * num_blocks)


@triton.jit(do_not_specialize=["steps", "num_blocks"])
def _classify(
    k_pos, span, q_pos, k_doc, q_doc, scratch, S, T, heads, steps, num_blocks,
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
    queries = q_pos + b * qp_b
    first = _lower_bound(queries, T, steps, born + MIN_AGE)
    end = _lower_bound(queries, T, steps, born + lifetime(length, ramp))
    fades = _lower_bound(queries, T, steps, born + whole + 1)
    last = tl.zeros_like(first) + T
    if HAS_DOCS:
        document = tl.load(k_doc + b * S + at, mask=inside, other=0)
        first = tl.maximum(first, _lower_bound(q_doc + b * T, T, steps, document))
        last = _lower_bound(q_doc + b * T, T, steps, document + 1)
        last = tl.where(document == LARGEST_ID, T, last)  # its successor is no 64-bit number
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
    scratch = _scratch_row(scratch, row, S, num_blocks)
    tl.store(scratch + at, first, mask=inside)
    tl.store(scratch + S + at, end, mask=inside)
    tl.store(scratch + 2 * S + at, fades, mask=inside)
    tl.store(scratch + 3 * S + at, kind, mask=inside)
    counts = scratch + 4 * S + block
    for c in tl.static_range(CLASSES):
        count = tl.sum(((kind == c) & inside).to(tl.int32), 0)
        tl.store(counts + c * num_blocks, count)


@triton.jit
def _join_thin(total, T, BLOCK_N: tl.constexpr):
    """The class that each class [CLASSES] is merged into, itself or one of longer lives, given `total` members of each.

    A query reads one tile of a class for every BLOCK_N members that are alive for it, plus one that is partly filled. Of n members
    with lives of at most l of T queries, n l / T are alive for a query, so it reads 1 + n l / (BLOCK_N T) tiles. Merged into a class
    with lives of at most l' > l, they save the partly filled tile and cost n (l' - l) / (BLOCK_N T) more tiles: merging pays
    if n (l' - l) < BLOCK_N T. The loop goes from the shortest lives to the longest and merges what it has gathered so far.
    """
    c = tl.arange(0, CLASSES)
    into = c
    limit = FIRST_LIMIT
    # Triton's loops need values of one type throughout, so these begin as tensors; members times life need 64 bits.
    gathered = tl.sum(tl.zeros_like(c), 0) + DEAD  # the class that holds what was gathered so far
    count = tl.sum(tl.zeros([CLASSES], tl.int64), 0)  # its number of members
    longest = count  # the longest life among them
    for n in tl.static_range(CLASSES - 2):
        kind = DEAD - 1 - n
        here = tl.sum(tl.where(c == kind, total, 0).to(tl.int64), 0)
        extra = count * (limit - longest)
        joins = (here > 0) & (count > 0) & (extra < (here * 0 + T) * BLOCK_N)
        into = tl.where(joins & (into == gathered), kind, into)
        count = tl.where(joins, count + here, tl.where(here > 0, here, count))
        longest = tl.where(here > 0, limit, longest)
        gathered = tl.where(here > 0, kind, gathered)
        limit = limit * 2
    return into


@triton.jit
def _count_members(counts, block, num_blocks, PIECE: tl.constexpr):
    """Members of each class [CLASSES] in the blocks before `block`, and in all blocks, from `counts` [CLASSES, num_blocks]."""
    c = tl.arange(0, CLASSES)
    before = tl.zeros([CLASSES], tl.int32)
    total = tl.zeros([CLASSES], tl.int32)
    for piece in range(0, num_blocks, PIECE):
        other = piece + tl.arange(0, PIECE)
        at = counts + c[:, None] * num_blocks + other[None, :]
        count = tl.load(at, mask=(other < num_blocks)[None, :], other=0)
        before += tl.sum(tl.where((other < block)[None, :], count, 0), 1)
        total += tl.sum(count, 1)
    return before, total


@triton.jit
def _find_slots(kind_before, into, next_slot, BLOCK: tl.constexpr):
    """The slot of each of a block's memories [BLOCK], from its class before merging and each class's next free slot [CLASSES]."""
    c = tl.arange(0, CLASSES)
    kind = kind_before
    for n in tl.static_range(CLASSES):
        kind = tl.where(kind_before == n, tl.sum(tl.where(c == n, into, 0), 0), kind)
    slot = tl.zeros([BLOCK], tl.int32)
    for n in tl.static_range(CLASSES):
        mine = (kind == n).to(tl.int32)
        here = tl.sum(tl.where(c == n, next_slot, 0), 0)
        slot = tl.where(mine == 1, here + tl.cumsum(mine, 0) - 1, slot)
    return slot


@triton.jit(do_not_specialize=["num_blocks"])
def _scatter(
    scratch, words, S, T, num_blocks, row_words, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, PIECE: tl.constexpr
):  # fmt: skip
    """The slot of every memory: stably sorted by class. Each class starts on a tile boundary, and -1 fills its last tile.

    Every program adds up all counts by itself, which is cheaper than another kernel launch that does it once.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scratch = _scratch_row(scratch, row, S, num_blocks)
    words += row * row_words
    c = tl.arange(0, CLASSES)
    before, total = _count_members(scratch + 4 * S, block, num_blocks, PIECE)
    into = _join_thin(total, T, BLOCK_N)
    joined = into[None, :] == c[:, None]  # [classes after, classes before]
    total = tl.sum(tl.where(joined, total[None, :], 0), 1)
    before = tl.sum(tl.where(joined, before[None, :], 0), 1)
    tiles = (total + BLOCK_N - 1) // BLOCK_N
    stop = tl.cumsum(tiles, 0)
    start = (stop - tiles) * BLOCK_N
    if block == 0:
        tl.store(words + c, stop - tiles)
        tl.store(words + CLASSES, tl.sum(tiles, 0))
        padding = (start + total)[:, None] + tl.arange(0, BLOCK_N)[None, :]
        tl.store(order_at(words) + padding, tl.zeros_like(padding) - 1, mask=padding < (stop * BLOCK_N)[:, None])
    i = block * BLOCK + tl.arange(0, BLOCK)
    kind = tl.load(scratch + 3 * S + i, mask=i < S, other=-1)
    tl.store(order_at(words) + _find_slots(kind, into, start + before, BLOCK), i, mask=i < S)


@triton.jit(do_not_specialize=["kv_heads", "num_blocks", "steps"])
def _gather(
    k, v, scratch, words, k_pos, span, q_pos, k_out, v_out,  # read, except for k_out, v_out and parts of `words`
    S, T, slots, kv_heads, heads, row_words, num_blocks, steps,  # sizes
    k_b, k_h, k_s, v_b, v_h, v_s, kp_b, kp_h, kp_s, sp_b, sp_h, sp_s, qp_b,  # strides
    WINDOW: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    row_head = tl.minimum(h, heads - 1)
    row = b * heads + row_head
    words += row * row_words
    used_tiles = tl.load(words + CLASSES)
    living = tl.load(words + DEAD)
    paired = (living + 1) // 2 * 2  # kernels that take tiles in pairs must find zeros beside the last living tile
    if tile >= tl.maximum(used_tiles, paired):
        return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(order_at(words) + slot, mask=slot < used_tiles * BLOCK_N, other=-1)
    used = index >= 0
    at = tl.maximum(index, 0).to(tl.int64)
    d = tl.arange(0, D_PAD)
    if tile < paired:
        taken = (used & (slot < living * BLOCK_N))[:, None] & (d[None, :] < D)
        out = (bh * slots + slot)[:, None] * D + d[None, :]
        rows = tl.load(k + b * k_b + h * k_h + at[:, None] * k_s + d[None, :], mask=taken, other=0.0)
        tl.store(k_out + out, rows, mask=d[None, :] < D)
        rows = tl.load(v + b * v_b + h * v_h + at[:, None] * v_s + d[None, :], mask=taken, other=0.0)
        tl.store(v_out + out, rows, mask=d[None, :] < D)
    if h < heads:
        scratch = _scratch_row(scratch, row, S, num_blocks)
        first = tl.load(scratch + at, mask=used, other=NEVER)
        end = tl.load(scratch + S + at, mask=used, other=0)
        fades = tl.load(scratch + 2 * S + at, mask=used, other=NEVER)  # padding does not make a tile need the mask
        born = tl.load(k_pos + b * kp_b + row_head * kp_h + at * kp_s, mask=used, other=0).to(tl.int64)
        plain = tl.max(first, 0)
        # A tile with a memory of age WINDOW or less must be among the masked ones, where the table is read.
        if WINDOW > 0:
            youngest = tl.max(tl.where(used, born, -(1 << 62)), 0)
            plain = tl.maximum(plain, _lower_bound(q_pos + b * qp_b, T, steps, youngest + (WINDOW + 1)))
        born = tl.minimum(tl.maximum(born - tl.load(q_pos + b * qp_b).to(tl.int64), -FAR), FAR).to(tl.int32)
        born = tl.where(used, born, FAR)  # padding is never born
        length = tl.load(span + b * sp_b + row_head * sp_h + at * sp_s, mask=used, other=0.0).to(tl.float32)
        tl.store(first_at(words, slots) + slot, first)
        tl.store(end_at(words, slots) + slot, end)
        fates = fates_at(words, slots) + 2 * slot
        tl.store(fates, born)
        tl.store(fates + 1, length.to(tl.int32, bitcast=True))
        num_tiles = slots // BLOCK_N
        tiles = extents_at(words, slots) + tile
        tl.store(tiles, tl.min(first, 0))
        tl.store(tiles + num_tiles, plain)
        tl.store(tiles + 2 * num_tiles, tl.max(end, 0))
        tl.store(tiles + 3 * num_tiles, tl.min(fades, 0))


@triton.jit
def _store_run(runs, rank, start, length):
    """Write a run at place `rank` of the list, unless it is empty; returns the next free place."""
    some = length > 0
    tl.store(runs + 2 * rank, start, mask=some)
    tl.store(runs + 2 * rank + 1, length, mask=some)
    return rank + some.to(tl.int32)


@triton.jit(do_not_specialize=["num_tiles"])
def _find_runs(words, q_pos, T, slots, num_tiles, heads, row_words, qp_b, BLOCK_M: tl.constexpr, PIECE: tl.constexpr):
    """Find the runs of each class in one pass over its tiles' extents. Births do not decrease within a class: born tiles come first."""
    row, qt = tl.program_id(1).to(tl.int64), tl.program_id(0)
    q0 = qt * BLOCK_M
    q1 = tl.minimum(q0 + BLOCK_M, T)
    words += row * row_words
    tiles = extents_at(words, slots)
    out = entry_at(words, qt, slots, num_tiles, BLOCK_M)
    query = q0 + tl.arange(0, BLOCK_M)
    t_row = q_pos + row // heads * qp_b
    t0 = tl.load(t_row + q0)
    real = query < T
    # Queries beyond T are placed before all memories, which are clamped to -FAR. Otherwise very old memories and padding would
    # have a small positive age for them, and the gradient of the relative keys' table would be written into the next row.
    since = tl.where(real, tl.load(t_row + query, mask=real, other=0) - t0, -2 * FAR)
    tl.store(out + POSITION_AT, (t0 - tl.load(t_row)).to(tl.int32))
    tl.store(out + WORDS + tl.arange(0, BLOCK_M), since.to(tl.float32).to(tl.int32, bitcast=True))
    full_runs = qt * 0
    masked_runs = full_runs
    full = full_runs
    masked = full_runs
    for kind in range(DEAD):
        start = tl.load(words + kind)
        stop = tl.load(words + kind + 1)
        if stop > start:
            high = start  # tiles before it have a memory that is born before the query tile ends
            low = stop  # tiles before it are dead
            full_high = start  # tiles before it hold only memories that are born before the query tile begins
            full_low = start  # tiles from here to full_high have no memory on its ramp
            for piece in range(start, stop, PIECE):
                tile = piece + tl.arange(0, PIECE)
                inside = tile < stop
                born = tl.load(tiles + tile, mask=inside, other=NEVER) < q1
                wholly = tl.load(tiles + num_tiles + tile, mask=inside, other=NEVER) <= q0
                lives = tl.load(tiles + 2 * num_tiles + tile, mask=inside, other=0) > q0
                fades = tl.load(tiles + 3 * num_tiles + tile, mask=inside, other=NEVER) < q1
                high = tl.maximum(high, tl.max(tl.where(born, tile + 1, 0), 0))
                low = tl.minimum(low, tl.min(tl.where(lives, tile, NEVER), 0))
                full_high = tl.maximum(full_high, tl.max(tl.where(wholly, tile + 1, 0), 0))
                full_low = tl.maximum(full_low, tl.max(tl.where(wholly & fades, tile + 1, 0), 0))
            low = tl.minimum(low, high)
            full_high = tl.minimum(tl.maximum(full_high, low), high)
            full_low = tl.minimum(tl.maximum(full_low, low), full_high)
            full_runs = _store_run(out + FULL_AT, full_runs, full_low, full_high - full_low)
            masked_runs = _store_run(out + MASKED_AT, masked_runs, low, full_low - low)
            masked_runs = _store_run(out + MASKED_AT, masked_runs, full_high, high - full_high)
            full += full_high - full_low
            masked += (high - low) - (full_high - full_low)
    tl.store(out, full)
    tl.store(out + 1, masked)


def build_plan(
    k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, q_doc: Tensor | None, k_doc: Tensor | None,
    *, ramp: float, include_self: bool, block_m: int, block_n: int, window: int = 0,
) -> Plan:  # fmt: skip
    """Sort the memories by length of life and find the runs of every query tile. See the module's docstring.

    window: tiles with a memory of this age or younger count among those that need the mask.
    """
    (batch, kv_heads, memories, dim), queries, heads = k.shape, q_pos.shape[-1], num_heads(span, k_pos)
    rows, slots = batch * heads, num_slots(memories, queries, block_n)
    num_tiles, num_blocks = slots // block_n, max(1, -(-memories // BLOCK))
    row_words = num_words(slots, queries, block_m, block_n)
    scratch = torch.empty(rows * (4 * memories + NUM_CLASSES * num_blocks), device=k.device, dtype=torch.int32)
    words = torch.empty(rows, row_words, device=k.device, dtype=torch.int32)
    k_out, v_out = k.new_empty(batch, kv_heads, slots, dim), v.new_empty(batch, kv_heads, slots, dim)

    where = (*strides(k_pos), *strides(span), strides(q_pos)[0])
    documents = (k_doc, q_doc) if k_doc is not None else (k_pos, q_pos)
    steps = queries.bit_length()
    run_kernel(
        _classify, (rows, num_blocks),
        k_pos, span, q_pos, *documents, scratch, memories, queries, heads, steps, num_blocks,
        *where, ramp, MIN_AGE=0 if include_self else 1, HAS_DOCS=k_doc is not None, BLOCK=BLOCK,
    )  # fmt: skip
    run_kernel(
        _scatter,
        (rows, num_blocks),
        scratch,
        words,
        memories,
        queries,
        num_blocks,
        row_words,
        BLOCK=BLOCK,
        BLOCK_N=block_n,
        PIECE=64,
    )
    run_kernel(
        _gather, (num_tiles, batch * kv_heads),
        k, v, scratch, words, k_pos, span, q_pos, k_out, v_out, memories, queries, slots, kv_heads, heads, row_words,
        num_blocks, steps, *k.stride()[:3], *v.stride()[:3], *where, WINDOW=window, D=dim,
        D_PAD=power_of_2(dim), BLOCK_N=block_n,
    )  # fmt: skip
    run_kernel(
        _find_runs,
        (-(-queries // block_m), rows),
        words,
        q_pos,
        queries,
        slots,
        num_tiles,
        heads,
        row_words,
        strides(q_pos)[0],
        BLOCK_M=block_m,
        PIECE=256,
        num_warps=1,
    )
    return Plan(words, k_out, v_out, 0 if include_self else 1)
