"""Backward pass, one program per query tile, over the same runs of memory tiles as the forward pass: dq. See `backward.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import (
    BOUND,
    find_entries,
    load_fate,
    load_queries,
    load_since,
    load_tile,
    next_tile,
)
from .layout import FULL_AT, MASKED_AT, POSITION_AT, end_at, entry_at, fates_at, first_at
from .rule import fade, find_remaining, tanh


@triton.jit
def _walk_tiles(
    dq, q, dy, lse, delta, k_source, v_source, table, dtable, first_row, runs, count, words, slots, q_index, q_heads, since, t0,
    scale, log_scale, inv_ramp, MASKED: tl.constexpr, MIN_AGE: tl.constexpr, SHARP: tl.constexpr, HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr,
    SQUASH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, since.shape[0])
    run = 0
    tile = tl.load(runs)
    left = tl.load(runs + 1)
    for _ in range(count):
        k = load_tile(k_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
        v = load_tile(v_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
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
            flat = 1 - s * s
        s = s * log_scale - lse[:, None]
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        if MASKED:
            birth, span = load_fate(words, slots, slot, t0)
            m = fade(find_remaining(birth[None, :], span[None, :], since[:, None], MIN_AGE, True, SHARP), inv_ramp)
            if HAS_DOCS:
                first, end = tl.load(first_at(words, slots) + slot), tl.load(end_at(words, slots) + slot)
                m = tl.where((q_index[:, None] >= first[None, :]) & (q_index[:, None] < end[None, :]), m, 0.0)
            e = tl.math.exp2(tl.minimum(s, BOUND))
            if EPS != 0:
                e = tl.where(m > 0, e, 0.0)
            p = m * e
        else:
            e = tl.math.exp2(s)
            p = e
        ds = p * (dp - delta[:, None])
        if EPS != 0:
            ds -= EPS * e * delta[:, None]
        if SQUASH != 0:
            ds *= flat
        if MASKED and WINDOW > 0:  # living memories have different ages, so no entry of dtable is stored twice
            tl.store(dtable + at, tl.trans((ds * scale).to(dtable.dtype.element_ty)), mask=near)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        run, tile, left = next_tile(runs, run, tile, left)
    return dq


@triton.jit(do_not_specialize=["q_heads"])
def query_gradient(
    q, dy, y, lse, k, v, words, table,  # read: queries, outputs and their gradients, sorted memories, the plan
    delta, dtable, dq,  # written
    T, slots, q_heads, group, heads, row_words, q_b, q_h, q_t, dy_b, dy_h, dy_t,  # sizes and strides
    scale, log_scale, inv_ramp,
    PLAN_M: tl.constexpr, MIN_AGE: tl.constexpr, SHARP: tl.constexpr, HAS_DOCS: tl.constexpr,
    WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Writes dq; delta, which the memories' gradients need; and, with relative keys, the gradient of their table."""
    qt, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    kv_bh = b * (q_heads // group) + h // group
    row = b * heads + tl.minimum(h // group, heads - 1)
    q_index = qt * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    inside = q_index < T
    mask = inside[:, None] & (d[None, :] < D)
    q_tile = load_queries(q, b, h, qt * BLOCK_M, T, q_b, q_h, q_t, D, D_PAD, BLOCK_M, TMA)
    dy_tile = load_queries(dy, b, h, qt * BLOCK_M, T, dy_b, dy_h, dy_t, D, D_PAD, BLOCK_M, TMA)
    lse_tile = tl.load(lse + bh * T + q_index, mask=inside, other=float("inf"))
    first_row = ((b * T + qt * BLOCK_M) * q_heads + h) * D
    y += first_row
    dq += first_row
    out = tl.arange(0, BLOCK_M)[:, None] * (q_heads * D) + d[None, :]
    y_tile = tl.load(y + out, mask=mask, other=0.0).to(tl.float32)
    delta_tile = tl.sum(y_tile * dy_tile.to(tl.float32), 1)
    tl.store(delta + bh * T + q_index, delta_tile, mask=inside)
    words += row * row_words
    entry = entry_at(words, qt * BLOCK_M // PLAN_M, slots, slots // BLOCK_N, PLAN_M)
    t0 = tl.load(entry + POSITION_AT)
    since = load_since(entry, qt, BLOCK_M, PLAN_M)
    if WINDOW > 0:
        start = ((b * T + qt * BLOCK_M) * q_heads + h) * WINDOW
        table += start
        dtable += start
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, table, dtable, kv_bh * slots, entry + FULL_AT, tl.load(entry), words,
        slots, q_index, q_heads, since, t0, scale, log_scale, inv_ramp, False, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH, D,
        D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, table, dtable, kv_bh * slots, entry + MASKED_AT, tl.load(entry + 1),
        words, slots, q_index, q_heads, since, t0, scale, log_scale, inv_ramp, True, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH,
        D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    tl.store(dq + out, (acc * scale).to(dq.dtype.element_ty), mask=mask)
