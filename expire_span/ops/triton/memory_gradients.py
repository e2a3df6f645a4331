"""Backward pass, one program per memory tile: dk, dv and dspan. See `backward.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from .forward import BOUND, find_entries, load_queries, load_since, load_tile
from .layout import (
    CLASSES,
    DEAD,
    FAR,
    NEVER,
    POSITION_AT,
    WORDS,
    end_at,
    entry_at,
    extents_at,
    fates_at,
    first_at,
    order_at,
)
from .rule import fade, find_remaining, slope, tanh


@triton.jit
def load_row(x, q_index, T, beyond, EVEN: tl.constexpr):
    """x of these queries, or `beyond` for those beyond the last."""
    return tl.load(x + q_index) if EVEN else tl.load(x + q_index, mask=q_index < T, other=beyond)


@triton.jit
def _walk_queries(
    dk, dv, dspan, k, v, q, dy, lse, delta, table, begin, pause, again, stop, b, q_head, q_heads, T, q_b, q_h, q_t, dy_b, dy_h,
    dy_t, entries, first, end, born, span, log_scale, half, inv_ramp, MASKED: tl.constexpr, MIN_AGE: tl.constexpr, SHARP: tl.constexpr,
    HAS_DOCS: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, PLAN_M: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Add the gradients of one memory tile over the query tiles [begin, pause) and [again, stop).

    Scores and weights are transposed, [BLOCK_N, BLOCK_M]. `half` is half the ramp.
    """
    for n in range(begin, pause + stop - again):
        qt = n
        if MASKED:
            qt = tl.where(n < pause, n, n - pause + again)
        q_index = qt * BLOCK_M + tl.arange(0, BLOCK_M)
        q_tile = load_queries(q, b, q_head, qt * BLOCK_M, T, q_b, q_h, q_t, D, D_PAD, BLOCK_M, TMA, EVEN)
        if MASKED:
            entry = entries + qt * BLOCK_M // PLAN_M * (WORDS + PLAN_M)
            t0 = tl.load(entry + POSITION_AT)
            since = load_since(entry, qt, BLOCK_M, PLAN_M)
        if MASKED and WINDOW > 0:
            # The bias is the initial value of the product. If it were added afterwards, Triton would use its layout from there on.
            at, near = find_entries(tl.arange(0, BLOCK_M), q_heads, since.to(tl.int32) + t0, born, WINDOW)
            rows = table + qt.to(tl.int64) * (BLOCK_M * q_heads * WINDOW)
            bias = tl.load(rows + at, mask=near, other=0.0).to(tl.float32)
            s = tl.dot(k, tl.trans(q_tile), bias, input_precision=PRECISION)
        else:
            s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        if SQUASH != 0:
            s = tanh(s * SQUASH)
            flat = 1 - s * s
        s = s * log_scale - load_row(lse, q_index, T, float("inf"), EVEN)[None, :]
        dy_tile = load_queries(dy, b, q_head, qt * BLOCK_M, T, dy_b, dy_h, dy_t, D, D_PAD, BLOCK_M, TMA, EVEN)
        dp = tl.dot(v, tl.trans(dy_tile), input_precision=PRECISION)
        delta_tile = load_row(delta, q_index, T, 0.0, EVEN)[None, :]
        dp -= delta_tile
        if MASKED:
            birth = (born - t0).to(tl.float32)
            remaining = find_remaining(birth[:, None], span[:, None], since[None, :], MIN_AGE, False, SHARP)
            if HAS_DOCS:
                inside = (q_index[None, :] >= first[:, None]) & (q_index[None, :] < end[:, None])
                remaining = tl.where(inside, remaining, float("-inf"))
            m = fade(remaining, inv_ramp)
            e = tl.math.exp2(tl.minimum(s, BOUND))
            if EPS != 0:
                e = tl.where(m > 0, e, 0.0)
            p = m * e
            dspan += tl.sum(slope(e * dp, remaining, half), 1)
        else:
            e = tl.math.exp2(s)
            p = e
        dv = tl.dot(p.to(dy_tile.dtype), dy_tile, dv, input_precision=PRECISION)
        ds = p * dp
        if EPS != 0:
            ds -= EPS * e * delta_tile
        if SQUASH != 0:
            ds *= flat
        ds = ds.to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision=PRECISION)
    return dk, dv, dspan


@triton.jit
def _extent(words, tile, slots, PLAN_N: tl.constexpr, WIDTH: tl.constexpr):
    """The joint extent of WIDTH neighbouring tiles, dead ones left out. If one of them is dead, the others always need the mask."""
    num_tiles = slots // PLAN_N
    tiles = extents_at(words, slots)
    living = tl.load(words + DEAD)
    first, plain, end, fades = NEVER, 0, 0, NEVER
    for n in tl.static_range(WIDTH):
        at = tile * WIDTH + n
        inside = at < living
        first = tl.minimum(first, tl.load(tiles + at, mask=inside, other=NEVER))
        plain = tl.maximum(plain, tl.load(tiles + num_tiles + at, mask=inside, other=NEVER))
        end = tl.maximum(end, tl.load(tiles + 2 * num_tiles + at, mask=inside, other=0))
        fades = tl.minimum(fades, tl.load(tiles + 3 * num_tiles + at, mask=inside, other=NEVER))
    return first, plain, end, fades


@triton.jit
def _store_gradients(dk, dv, dspan, dk_acc, dv_acc, dspan_acc, mask, used):
    tl.store(dk, dk_acc.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv, dv_acc.to(dv.dtype.element_ty), mask=mask)
    tl.store(dspan, dspan_acc, mask=used)


@triton.jit(do_not_specialize=["kv_heads", "window", "splits", "num_rows"])
def memory_gradients(
    q, dy, lse, delta, k, v, words, table,  # read: queries and their gradients, sorted memories, the plan
    dk, dv, dspan, sums,  # written
    T, S, slots, kv_heads, group, heads, row_words, window, splits, num_rows,  # sizes
    q_b, q_h, q_t, dy_b, dy_h, dy_t,  # strides
    scale, log_scale, half, inv_ramp,
    SPLIT: tl.constexpr, PLAN_M: tl.constexpr, PLAN_N: tl.constexpr, MIN_AGE: tl.constexpr, SHARP: tl.constexpr, HAS_DOCS: tl.constexpr,
    WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """One program per memory tile and window of `window` query tiles of its life; the longest-lived tiles come first.

    A tile whose life fits into one window writes its gradients directly. The partial sums of a longer one are added into `sums`,
    which `long_tiles` then rounds into dk and dv.
    """
    part, bh = tl.program_id(0) % splits, (tl.program_id(0) // splits % num_rows).to(tl.int64)
    tile = tl.program_id(0) // (splits * num_rows)
    b, h = bh // kv_heads, bh % kv_heads
    row = b * heads + tl.minimum(h, heads - 1)
    words += row * row_words
    if tile * (BLOCK_N // PLAN_N) >= tl.load(words + CLASSES):
        return
    born_from, plain_from, dies, fading = _extent(words, tile, slots, PLAN_N, BLOCK_N // PLAN_N)
    stop = tl.cdiv(dies, BLOCK_M)
    begin = tl.minimum(born_from // BLOCK_M, stop)
    long = stop - begin > window
    if SPLIT:
        begin += part * window
        stop = tl.minimum(stop, begin + window)
        if (stop <= begin) & (part > 0):
            return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k, bh * slots + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
    v_tile = load_tile(v, bh * slots + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
    taken = slot < tl.load(words + CLASSES) * PLAN_N
    first = tl.load(first_at(words, slots) + slot, mask=taken, other=NEVER)
    end = tl.load(end_at(words, slots) + slot, mask=taken, other=0)
    fates = fates_at(words, slots) + 2 * slot
    born = tl.load(fates, mask=taken, other=FAR)
    span = tl.load(fates + 1, mask=taken, other=0).to(tl.float32, bitcast=True)
    full_from = tl.minimum(plain_from, T)  # padding slots are never born
    full_from = tl.minimum(tl.maximum(tl.cdiv(full_from, BLOCK_M), begin), stop)
    full_to = tl.minimum(tl.maximum(fading // BLOCK_M, full_from), stop)
    entries = entry_at(words, 0, slots, slots // PLAN_N, PLAN_M)
    dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dspan_acc = tl.zeros([BLOCK_N], tl.float32)
    for g in range(group):
        q_head = h * group + g
        q_bh = bh * group + g
        lse_at, delta_at, table_at = (
            lse + q_bh * T,
            delta + q_bh * T,
            table + (b * T * kv_heads * group + q_head) * WINDOW,
        )
        dk_acc, dv_acc, dspan_acc = _walk_queries(
            dk_acc, dv_acc, dspan_acc, k_tile, v_tile, q, dy, lse_at, delta_at, table_at, full_from, full_to,
            full_to, full_to, b, q_head, kv_heads * group, T, q_b, q_h, q_t, dy_b, dy_h, dy_t, entries, first, end, born, span,
            log_scale, half, inv_ramp, False, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH, D, D_PAD, BLOCK_M, PLAN_M, PRECISION, TMA,
            EVEN,
        )  # fmt: skip
        dk_acc, dv_acc, dspan_acc = _walk_queries(
            dk_acc, dv_acc, dspan_acc, k_tile, v_tile, q, dy, lse_at, delta_at, table_at, begin, full_from,
            full_to, stop, b, q_head, kv_heads * group, T, q_b, q_h, q_t, dy_b, dy_h, dy_t, entries, first, end, born, span,
            log_scale, half, inv_ramp, True, MIN_AGE, SHARP, HAS_DOCS, WINDOW, EPS, SQUASH, D, D_PAD, BLOCK_M, PLAN_M, PRECISION, TMA,
            EVEN,
        )  # fmt: skip
    index = tl.load(order_at(words) + slot, mask=taken, other=-1)
    d = tl.arange(0, D_PAD)
    mask = (index >= 0)[:, None] & (d[None, :] < D)
    dk_acc *= scale
    dspan_acc *= inv_ramp
    out = ((b * S + tl.maximum(index, 0)) * kv_heads + h)[:, None] * D + d[None, :]
    dspan += bh * S + index
    if SPLIT:
        if long:
            at = sums + (bh * slots + slot)[:, None] * D + d[None, :]
            tl.atomic_add(at, dk_acc, mask=mask, sem="relaxed")
            tl.atomic_add(at + num_rows.to(tl.int64) * slots * D, dv_acc, mask=mask, sem="relaxed")
            tl.atomic_add(dspan, dspan_acc, mask=index >= 0, sem="relaxed")
        else:
            _store_gradients(dk + out, dv + out, dspan, dk_acc, dv_acc, dspan_acc, mask, index >= 0)
    else:
        _store_gradients(dk + out, dv + out, dspan, dk_acc, dv_acc, dspan_acc, mask, index >= 0)


@triton.jit(do_not_specialize=["kv_heads", "window"])
def long_tiles(
    words, dk, dv, dspan, sums, S, slots, kv_heads, heads, row_words, window, FINISH: tl.constexpr, PLAN_N: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """For tiles that live longer than a window: clear their sums before `memory_gradients`, or (FINISH) round them into dk and dv."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    words += (b * heads + tl.minimum(h, heads - 1)) * row_words
    total = tl.load(words + CLASSES)
    if tile * (BLOCK_N // PLAN_N) >= total:
        return
    first, _, end, _ = _extent(words, tile, slots, PLAN_N, BLOCK_N // PLAN_N)
    if tl.cdiv(end, BLOCK_M) - first // BLOCK_M <= window:
        return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(order_at(words) + slot, mask=slot < total * PLAN_N, other=-1)
    d = tl.arange(0, D_PAD)
    mask = (index >= 0)[:, None] & (d[None, :] < D)
    dk_sum = sums + (bh * slots + slot)[:, None] * D + d[None, :]
    dv_sum = dk_sum + tl.num_programs(1).to(tl.int64) * slots * D
    if FINISH:
        out = ((b * S + tl.maximum(index, 0)) * kv_heads + h)[:, None] * D + d[None, :]
        tl.store(dk + out, tl.load(dk_sum, mask=mask, other=0.0).to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + out, tl.load(dv_sum, mask=mask, other=0.0).to(dv.dtype.element_ty), mask=mask)
    else:
        zeros = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        tl.store(dk_sum, zeros, mask=mask)
        tl.store(dv_sum, zeros, mask=mask)
        tl.store(dspan + bh * S + index, tl.zeros([BLOCK_N], tl.float32), mask=index >= 0)
