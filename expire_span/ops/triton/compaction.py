"""Compaction of slots (store/slots.py) as one kernel: what is dead is deleted, and living memories move into the gaps.

`Slots.compact` in plain PyTorch moves all memories of a head together, since a stable order is what tensor operations give. Older
slots may be in any order, so here only those memories move that must: the living ones of the fresh slots, and those at the end of
the older slots, into slots whose memories have died. The rest stays where it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import run_kernel
from .layout import power_of_2
from .rule import is_alive
from .slots import Fields

SCAN, MOVE = 256, 32
"""Slots whose spans a program reads at once, and memories that it moves at once."""


@triton.jit
def _find_living(pos, span, i, there, ramp, FRESH: tl.constexpr):
    """Which of the slots i hold memories that are alive for the first query after the compaction."""
    age = FRESH - tl.load(pos + i, mask=there, other=0.0)
    return there & is_alive(tl.load(span + i, mask=there, other=float("-inf")) - age, ramp)


@triton.jit
def _count_living(pos, span, count, ramp, FRESH: tl.constexpr, SCAN: tl.constexpr):
    living = 0
    for start in range(0, count, SCAN):
        i = start + tl.arange(0, SCAN)
        living += tl.sum(_find_living(pos, span, i, i < count, ramp, FRESH).to(tl.int32), 0)
    return living


@triton.jit
def _list_gaps(pos, span, gaps, count, total, ramp, FRESH: tl.constexpr, SCAN: tl.constexpr):
    """Write the indices of the slots below `total` that hold nothing alive into `gaps`, and return their number; what the other
    slots below it hold stays there, and only its position changes."""
    found = 0
    for start in range(0, total, SCAN):
        i = start + tl.arange(0, SCAN)
        stays = _find_living(pos, span, i, (i < count) & (i < total), ramp, FRESH)
        tl.store(pos + i, tl.load(pos + i, mask=stays, other=0.0) - FRESH, mask=stays)
        gap = ((i < total) & ~stays).to(tl.int32)
        tl.store(gaps + found + tl.cumsum(gap, 0) - 1, i, mask=gap > 0)
        found += tl.sum(gap, 0)
    return found


@triton.jit
def _move(
    from_k, from_v, from_pos, from_span, to_k, to_v, to_pos, to_span, gaps, i, there, used, room, ramp, d, inside,
    FRESH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Move the living memories of the slots i into the gaps from number `used` on, of which there are `room`; returns the number
    of gaps used by now. What does not fit is lost."""
    living = _find_living(from_pos, from_span, i, there, ramp, FRESH).to(tl.int32)
    number = used + tl.cumsum(living, 0) - 1
    moves = (living > 0) & (number < room)
    to = tl.load(gaps + number, mask=moves, other=0)
    rows = moves[:, None] & inside[None, :]
    at, there_at = i[:, None] * D + d[None, :], to[:, None] * D + d[None, :]
    tl.store(to_k + there_at, tl.load(from_k + at, mask=rows, other=0.0), mask=rows)
    tl.store(to_v + there_at, tl.load(from_v + at, mask=rows, other=0.0), mask=rows)
    tl.store(to_pos + to, tl.load(from_pos + i, mask=moves, other=0.0) - FRESH, mask=moves)
    tl.store(to_span + to, tl.load(from_span + i, mask=moves, other=0.0), mask=moves)
    return used + tl.sum(living, 0)


@triton.jit
def _compact(
    k, v, pos, span, counts, bounds, gaps, slots, ramp,
    FRESH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, SCAN: tl.constexpr, MOVE: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row."""
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin, end = tl.load(bounds + h), tl.load(bounds + h + 1)
    base = b * slots + begin
    older = base + FRESH
    fresh_k, fresh_v, fresh_pos, fresh_span = k + base * D, v + base * D, pos + base, span + base
    old_k, old_v, old_pos, old_span = k + older * D, v + older * D, pos + older, span + older
    mine = gaps + base
    number = counts + b * tl.num_programs(1) + h
    count = tl.load(number)
    living = _count_living(old_pos, old_span, count, ramp, FRESH, SCAN) + _count_living(
        fresh_pos, fresh_span, FRESH, ramp, FRESH, FRESH
    )
    total = tl.minimum(living, end - begin - FRESH)
    room = _list_gaps(old_pos, old_span, mine, count, total, ramp, FRESH, SCAN)
    tl.debug_barrier()  # the list is complete before it is read
    d = tl.arange(0, D_PAD)
    inside = d < D
    used = 0
    for start in range(total // MOVE * MOVE, count, MOVE):
        i = start + tl.arange(0, MOVE)
        used = _move(
            old_k, old_v, old_pos, old_span, old_k, old_v, old_pos, old_span, mine, i, (i >= total) & (i < count), used, room,
            ramp, d, inside, FRESH, D,
        )  # fmt: skip
    for start in range(0, FRESH, MOVE):
        i = start + tl.arange(0, MOVE)
        used = _move(
            fresh_k, fresh_v, fresh_pos, fresh_span, old_k, old_v, old_pos, old_span, mine, i, i < FRESH, used, room,
            ramp, d, inside, FRESH, D,
        )  # fmt: skip
    tl.debug_barrier()  # everything has been moved before its old slots are marked as empty
    for start in range(total // SCAN * SCAN, count, SCAN):
        i = start + tl.arange(0, SCAN)
        tl.store(old_span + i, float("-inf"), mask=(i >= total) & (i < count))
    column = tl.arange(0, FRESH)
    tl.store(fresh_span + column, tl.full([FRESH], float("-inf"), tl.float32))
    tl.store(fresh_pos + column, column.to(tl.float32))
    tl.store(number, total)


def triton_compact(fields: Fields, fresh: int, ramp: float) -> None:
    """`Slots.compact`, with the older slots in another order. fresh: the number of fresh slots, a power of two."""
    rows, total, dim = fields.k.shape
    gaps = torch.empty(rows, total, dtype=torch.int32, device=fields.k.device)
    run_kernel(
        _compact, (rows, fields.counts.shape[1]), *fields, gaps, total, float(ramp),
        FRESH=fresh, D=dim, D_PAD=power_of_2(dim), SCAN=SCAN, MOVE=min(MOVE, fresh), num_warps=4,
    )  # fmt: skip
