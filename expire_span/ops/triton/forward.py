"""Forward pass: one program per query tile loops over its runs of memory tiles, first those of full weight, then the masked ones.

Scores are in base 2. `lse` is log2 of each query's normaliser, sum m e^s + EPS sum e^s over living memories; it is +inf for a
query without any, so that exp2(s - lse) is 0 there. A `table` [T, WINDOW] per head is added to the scores of memories of ages
1..WINDOW; the plan puts every tile with such a memory among the masked ones, where the table is read.

With soft caps, SQUASH is their scale: scores become c tanh(SQUASH q . k), and the factor `scale` is that c in base 2. With
SINKS, the sums of a head begin with its sink, as if it were a memory whose value is zero.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import run_kernel
from .layout import FULL_AT, MASKED_AT, POSITION_AT, WORDS, Plan, end_at, entry_at, fates_at, first_at, power_of_2
from .rule import fade, find_remaining, inverse, is_sharp, tanh
from .tuning import Tuning

LOG2E = 1.4426950408889634
BOUND = tl.constexpr(120.0)
"""Limit on score minus lse in the backward pass. Only dead memories exceed it; their 0 times e^s must give 0, not NaN."""


@triton.jit
def next_tile(runs, run, tile, left):
    """Step to the next tile of the current run, or to the first of the next run."""
    left -= 1
    over = left == 0
    run = tl.where(over, run + 1, run)
    start = tl.load(runs + 2 * run, mask=over, other=0)
    length = tl.load(runs + 2 * run + 1, mask=over, other=0)
    return run, tl.where(over, start, tile + 1), tl.where(over, length, left)


@triton.jit
def load_tile(memory, row, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """Rows [BLOCK_N, D_PAD] of sorted memories from `row` on; `memory` is a descriptor (TMA) or a pointer."""
    if TMA:
        rows = memory.load([row.to(tl.int32), 0])
    else:
        d = tl.arange(0, D_PAD)
        at = memory + row.to(tl.int64) * D + tl.arange(0, BLOCK_N)[:, None] * D + d[None, :]
        if D == D_PAD:
            rows = tl.load(at)
        else:
            rows = tl.load(at, mask=d[None, :] < D, other=0.0)
    return rows


@triton.jit
def load_queries(
    x, b, h, start, T, x_b, x_h, x_t, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, TMA: tl.constexpr,
    EVEN: tl.constexpr = False,
):  # fmt: skip
    """Rows [BLOCK_M, D_PAD] of one head of q or dy from query `start` on, zero beyond T. EVEN: T is a multiple of BLOCK_M."""
    if TMA:
        rows = x.load([b.to(tl.int32), h.to(tl.int32), start, 0]).reshape([BLOCK_M, D_PAD])
    else:
        row = tl.arange(0, BLOCK_M)
        d = tl.arange(0, D_PAD)
        at = x + (b * x_b + h * x_h + start.to(tl.int64) * x_t) + (row * x_t)[:, None] + d[None, :]
        if EVEN and D == D_PAD:
            rows = tl.load(at)
        else:
            rows = tl.load(at, mask=((start + row)[:, None] < T) & (d[None, :] < D), other=0.0)
    return rows


def relative_table(q: Tensor, relative_keys: Tensor | None) -> Tensor | None:
    """The scores that relative keys [M, D] add for memories of ages 1..M: [B, T, Hq, M], or None without relative keys."""
    if relative_keys is None or relative_keys.shape[0] == 0:
        return None
    return (q.transpose(1, 2).reshape(-1, q.shape[3]) @ relative_keys.to(q.dtype).T).view(
        *q.shape[:1], q.shape[2], q.shape[1], -1
    )


def empty_rows(batch: int, heads: int, count: int, dim: int, **like) -> Tensor:
    """An uninitialised [B, H, T, D] stored as [B, T, H, D], the order in which the projections around attention read it."""
    return torch.empty(batch, count, heads, dim, **like).transpose(1, 2)


def memory_source(x: Tensor, block_n: int, tma: bool) -> Tensor | TensorDescriptor:
    """What `load_tile` reads sorted memories [B, Hkv, slots, D] from."""
    if not tma:
        return x
    return TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [block_n, power_of_2(x.shape[-1])])


def query_source(x: Tensor, block_m: int, tma: bool) -> Tensor | TensorDescriptor:
    """What `load_queries` reads [B, H, T, D] from."""
    if not tma:
        return x
    return TensorDescriptor.from_tensor(x, [1, 1, block_m, power_of_2(x.shape[-1])])


@triton.jit
def load_fate(words, slots, slot, t0):
    """Birth of each slot's memory, in steps since position t0, and its span. Both words are read in one load."""
    pair = tl.load(fates_at(words, slots).to(tl.pointer_type(tl.int64)) + slot)
    birth = (pair.to(tl.int32) - t0).to(tl.float32)
    return birth, (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_since(entry, qt, BLOCK_M: tl.constexpr, PLAN_M: tl.constexpr):
    """Steps of a tile's queries since the first query of the plan's tile that it is in."""
    query = tl.arange(0, BLOCK_M)
    if BLOCK_M < PLAN_M:
        query += qt * BLOCK_M % PLAN_M
    return tl.load(entry + WORDS + query).to(tl.float32, bitcast=True)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x >= 0 rounded to dtype and back to float32. For bfloat16 by integer operations: converting is four times as slow."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(dtype).to(tl.float32)


@triton.jit
def find_entries(row, q_heads, t, born, WINDOW: tl.constexpr):
    """Offsets into one head's part of a table [rows, Hq, WINDOW] for all pairs [memories, queries], and which pairs it covers.

    Memories run along dimension 0, where Triton puts neighbouring threads, since the ages of neighbouring memories are next to
    each other in the table; the other way round every thread would read another cache line.
    """
    age = t[None, :] - born[:, None]
    return row[None, :] * (q_heads * WINDOW) + (age - 1), (age >= 1) & (age <= WINDOW)


@triton.jit
def _walk(
    acc, total, peak, q, k_source, v_source, table, first_row, runs, count, words, slots, q_index, q_heads, since, t0, scale,
    inv_ramp, MASKED: tl.constexpr, MIN_AGE: tl.constexpr, SHARP: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr,
    SQUASH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Online softmax over `count` memory tiles of the runs."""
    row = tl.arange(0, since.shape[0])
    run = 0
    tile = tl.load(runs)
    left = tl.load(runs + 1)
    for _ in range(count):
        k = load_tile(k_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
        slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED and WINDOW > 0:
            born = tl.load(fates_at(words, slots) + 2 * slot)
            at, near = find_entries(row, q_heads, since.to(tl.int32) + t0, born, WINDOW)
            bias = tl.trans(tl.load(table + at, mask=near, other=0.0)).to(tl.float32)
            s = tl.dot(q, tl.trans(k), bias, input_precision=PRECISION)
        else:
            s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if SQUASH != 0:
            s = tanh(s * SQUASH)
        if MASKED:
            birth, span = load_fate(words, slots, slot, t0)
            m = fade(find_remaining(birth[None, :], span[None, :], since[:, None], MIN_AGE, True, SHARP), inv_ramp)
            s = tl.where(m > 0, s, float("-inf"))
            if HAS_DOCS:
                first, end = tl.load(first_at(words, slots) + slot), tl.load(end_at(words, slots) + slot)
                s = tl.where((q_index[:, None] >= first[None, :]) & (q_index[:, None] < end[None, :]), s, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
            safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            e = tl.math.exp2(s * scale - safe[:, None])  # 0 where not alive
            # Sum the rounded weights, which the product with v also uses: in bf16 this lowers the error of y by a third.
            p = round_to(m * e, k.dtype)
            part = tl.sum(p, 1)
            if EPS != 0:
                part += EPS * tl.sum(e, 1)
        else:
            new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
            safe = new_peak
            p = tl.math.exp2(s * scale - safe[:, None])
            part = tl.sum(p, 1)
            if EPS != 0:
                part += EPS * part
        decay = tl.math.exp2(peak - safe)
        total = total * decay + part
        acc = acc * decay[:, None]
        v = load_tile(v_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
        run, tile, left = next_tile(runs, run, tile, left)
    return acc, total, peak


@triton.jit(do_not_specialize=["q_heads"])
def _forward(
    q, k, v, words, table, sinks,  # read: queries, sorted memories, the plan, scores of distances, one logit per head
    y, lse,  # written
    T, slots, q_heads, group, heads, row_words, q_b, q_h, q_t,  # sizes and strides
    scale, inv_ramp,
    MIN_AGE: tl.constexpr, SHARP: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr,
    SINKS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    # The last query tiles run first, since they read the most memories.
    qt, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    kv_bh = b * (q_heads // group) + h // group
    row = b * heads + tl.minimum(h // group, heads - 1)
    q_index = qt * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    inside = q_index < T
    mask = inside[:, None] & (d[None, :] < D)
    q_tile = load_queries(q, b, h, qt * BLOCK_M, T, q_b, q_h, q_t, D, D_PAD, BLOCK_M, TMA)
    words += row * row_words
    entry = entry_at(words, qt, slots, slots // BLOCK_N, BLOCK_M)
    t0 = tl.load(entry + POSITION_AT)
    since = load_since(entry, qt, BLOCK_M, BLOCK_M)
    if WINDOW > 0:
        table += ((b * T + qt * BLOCK_M) * q_heads + h) * WINDOW
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if SINKS:
        sink = tl.load(sinks + h)
        peak = tl.full([BLOCK_M], 0.0, tl.float32) + sink
        total += tl.where(sink == float("-inf"), 0.0, 1.0)
    acc, total, peak = _walk(
        acc, total, peak, q_tile, k, v, table, kv_bh * slots, entry + FULL_AT, tl.load(entry), words, slots, q_index,
        q_heads, since, t0, scale, inv_ramp, False, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    acc, total, peak = _walk(
        acc, total, peak, q_tile, k, v, table, kv_bh * slots, entry + MASKED_AT, tl.load(entry + 1), words, slots, q_index,
        q_heads, since, t0, scale, inv_ramp, True, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    lives = total > 0
    acc = acc * (1.0 / tl.where(lives, total, 1.0))[:, None]
    y += ((b * T + qt * BLOCK_M) * q_heads + h) * D
    out = tl.arange(0, BLOCK_M)[:, None] * (q_heads * D) + d[None, :]
    tl.store(y + out, acc.to(y.dtype.element_ty), mask=mask)
    tl.store(lse + bh * T + q_index, tl.where(lives, peak + tl.math.log2(total), float("inf")), mask=inside)


def squash(scale: float, softcap: float) -> float:
    """The factor of q . k under the hyperbolic tangent of soft caps; 0 where there are none."""
    return scale / softcap if softcap else 0.0


def run_forward(
    q: Tensor, plan: Plan, table: Tensor | None = None, *, ramp: float, scale: float, eps: float = 0.0,
    softcap: float = 0.0, sinks: Tensor | None = None, has_docs: bool, tuning: Tuning, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y [B, Hq, T, D] and lse [B, Hq, T]. table: [B, T, Hq, M], added to the scores of ages 1..M before they are scaled.
    sinks: float32 [Hq], in base 2."""
    batch, q_heads, queries, dim = q.shape
    kv_heads, slots = plan.k.shape[1:3]
    launch, block_n, tma = tuning.forward, tuning.block_n, tuning.tma
    y = empty_rows(batch, q_heads, queries, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    run_kernel(
        _forward, (-(-queries // launch.block_m), batch * q_heads),
        query_source(q, launch.block_m, tma), memory_source(plan.k, block_n, tma), memory_source(plan.v, block_n, tma),
        plan.words, lse if table is None else table, lse if sinks is None else sinks, y, lse, queries, slots, q_heads, q_heads // kv_heads,
        plan.words.shape[0] // batch, plan.words.shape[1], *q.stride()[:3], (softcap or scale) * LOG2E,
        inverse(ramp), MIN_AGE=plan.min_age, SHARP=is_sharp(ramp), HAS_DOCS=has_docs, WINDOW=0 if table is None else table.shape[-1], EPS=eps,
        SQUASH=squash(scale, softcap), SINKS=sinks is not None, D=dim,
        D_PAD=power_of_2(dim), BLOCK_M=launch.block_m, BLOCK_N=block_n, PRECISION=precision, TMA=tma,
        **launch.options,
    )  # fmt: skip
    return y, lse
