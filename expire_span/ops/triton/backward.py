"""Backward pass, with scores recomputed from lse. p = m e^(s - lse), e = e^(s - lse), delta = sum dy * y:

    dv_i = sum_t p dy_t      ds = p (dp - delta)      dk_i = sum_t ds q_t      dq_t = sum_i ds k_i
    dspan_i = sum over t on the ramp of e (dp - delta) / ramp            (never p / m: m may be tiny)

A memory is seen by one contiguous range of queries, so one program owns a memory tile, walks its queries and writes its
gradients once, without atomics. dq is added up on the way (atomically), or by a second, query-stationary kernel, which
is bitwise repeatable. A tile that lives long may be shared by several programs, whose parts are added up atomically.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import LOG2E, load_fate, load_queries, load_tile, memory_source, next_tile, query_source
from .lists import CLASSES, DEAD, FULL_AT, HEAD, MASKED_AT, NEVER, WORDS, Plan
from .tuning import Launch, Tuning


@triton.jit
def _delta(y, dy, delta, T, q_heads, dy_b, dy_h, dy_t, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    t, bh = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    d = tl.arange(0, D_PAD)
    mask = (t[:, None] < T) & (d[None, :] < D)
    a = tl.load(y + (bh * T + t)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + b * dy_b + h * dy_h + t.to(tl.int64)[:, None] * dy_t + d[None, :], mask=mask, other=0.0)
    tl.store(delta + bh * T + t, tl.sum(a * g.to(tl.float32), 1), mask=t < T)


@triton.jit
def _walk_tiles(
    dq, q, dy, lse, delta, k_source, v_source, first_row, runs, count, keys, slots, q_index, t0, since, scale, ramp,
    inv_ramp, MASKED: tl.constexpr, HAS_DOCS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    run = 0
    tile = tl.load(runs)
    left = tl.load(runs + 1)
    for _ in range(count):
        k = load_tile(k_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
        v = load_tile(v_source, first_row + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale - lse[:, None]
        dp = tl.dot(dy, tl.trans(v), input_precision=PRECISION)
        if MASKED:
            slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            first, end, life = load_fate(keys, slots, slot, t0, ramp)
            x = life[None, :] - since[:, None]
            alive = (x > 0) & (q_index[:, None] >= first[None, :])
            if HAS_DOCS:
                alive = alive & (q_index[:, None] < end[None, :])
            p = tl.minimum(x * inv_ramp, 1.0) * tl.math.exp2(tl.where(alive, s, float("-inf")))  # 0 where not alive
        else:
            p = tl.math.exp2(s)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        run, tile, left = next_tile(runs, run, tile, left)
    return dq


@triton.jit(do_not_specialize=["q_heads", "row_words"])
def _query_gradient(
    q, dy, y, lse, delta, k, v, words, q_pos, dq, T, slots, q_heads, group, heads, row_words, q_b, q_h, q_t, dy_b, dy_h,
    dy_t, qp_b, scale, log_scale, ramp, inv_ramp, PLAN_M: tl.constexpr, HAS_DOCS: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq, and delta on the way, which the memories' gradients need."""
    qt, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    kv_bh = b * (q_heads // group) + h // group
    row = b * heads + (h // group) % heads
    q_index = qt * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    inside = q_index < T
    mask = inside[:, None] & (d[None, :] < D)
    q_tile = load_queries(q, b, h, qt * BLOCK_M, T, q_b, q_h, q_t, D, D_PAD, BLOCK_M, TMA)
    dy_tile = load_queries(dy, b, h, qt * BLOCK_M, T, dy_b, dy_h, dy_t, D, D_PAD, BLOCK_M, TMA)
    lse_tile = tl.load(lse + bh * T + q_index, mask=inside, other=float("inf"))
    out = (bh * T + q_index)[:, None] * D + d[None, :]
    y_tile = tl.load(y + out, mask=mask, other=0.0).to(tl.float32)
    delta_tile = tl.sum(y_tile * dy_tile.to(tl.float32), 1)
    tl.store(delta + bh * T + q_index, delta_tile, mask=inside)
    t_row = q_pos + b * qp_b
    base = tl.load(t_row)
    t0 = (tl.load(t_row + qt * BLOCK_M) - base).to(tl.int32)
    t = (tl.load(t_row + q_index, mask=inside, other=0) - base).to(tl.int32)
    since = (t - t0).to(tl.float32)
    words += row * row_words + HEAD
    keys = words + slots
    runs = words + 5 * slots + 4 * (slots // BLOCK_N) + (qt * BLOCK_M // PLAN_M) * WORDS
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, kv_bh * slots, runs + FULL_AT, tl.load(runs), keys, slots,
        q_index, t0, since, log_scale, ramp, inv_ramp, False, HAS_DOCS, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, kv_bh * slots, runs + MASKED_AT, tl.load(runs + 1), keys,
        slots, q_index, t0, since, log_scale, ramp, inv_ramp, True, HAS_DOCS, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    tl.store(dq + out, (acc * scale).to(dq.dtype.element_ty), mask=mask)


@triton.jit
def _walk_queries(
    dk, dv, dspan, k, v, q, dy, lse, delta, dq, begin, pause, again, stop, b, q_head, T, q_b, q_h, q_t, dy_b, dy_h,
    dy_t, t_row, base, first, end, born, length, scale, log_scale, ramp, inv_ramp, MASKED: tl.constexpr,
    ADD_DQ: tl.constexpr, HAS_DOCS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One memory tile against the query tiles [begin, pause) and [again, stop): all is transposed, [BLOCK_N, BLOCK_M]."""
    d = tl.arange(0, D_PAD)
    for n in range(begin, pause + stop - again):
        qt = n
        if MASKED:
            qt = tl.where(n < pause, n, n - pause + again)
        q_index = qt * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = q_index < T
        q_tile = load_queries(q, b, q_head, qt * BLOCK_M, T, q_b, q_h, q_t, D, D_PAD, BLOCK_M, TMA)
        s = tl.dot(k, tl.trans(q_tile), input_precision=PRECISION)
        s = s * log_scale - tl.load(lse + q_index, mask=inside, other=float("inf"))[None, :]
        dy_tile = load_queries(dy, b, q_head, qt * BLOCK_M, T, dy_b, dy_h, dy_t, D, D_PAD, BLOCK_M, TMA)
        dp = tl.dot(v, tl.trans(dy_tile), input_precision=PRECISION)
        dp -= tl.load(delta + q_index, mask=inside, other=0.0)[None, :]
        if MASKED:
            t0 = (tl.load(t_row + qt * BLOCK_M) - base).to(tl.int32)
            t = (tl.load(t_row + q_index, mask=inside, other=0) - base).to(tl.int32)
            left = (length - (t0 - born).to(tl.float32)) + ramp
            x = left[:, None] - (t - t0).to(tl.float32)[None, :]
            alive = (x > 0) & (q_index[None, :] >= first[:, None])
            if HAS_DOCS:
                alive = alive & (q_index[None, :] < end[:, None])
            e = tl.math.exp2(tl.where(alive, s, float("-inf")))
            p = tl.minimum(x * inv_ramp, 1.0) * e  # 0 where not alive
            dspan += tl.sum(tl.where(x < ramp, e * dp, 0.0), 1)
        else:
            p = tl.math.exp2(s)
        dv = tl.dot(p.to(dy_tile.dtype), dy_tile, dv, input_precision=PRECISION)
        ds = (p * dp).to(q_tile.dtype)
        dk = tl.dot(ds, q_tile, dk, input_precision=PRECISION)
        if ADD_DQ:
            part = tl.dot(tl.trans(ds), k, input_precision=PRECISION) * scale
            if TMA:
                dq.atomic_add(
                    [b.to(tl.int32), q_head.to(tl.int32), qt * BLOCK_M, 0], part.reshape([1, 1, BLOCK_M, D_PAD])
                )
            else:
                at = dq + q_index.to(tl.int64)[:, None] * D + d[None, :]
                tl.atomic_add(at, part, mask=inside[:, None] & (d[None, :] < D), sem="relaxed")
    return dk, dv, dspan


@triton.jit
def _extent(words, tile, slots, PLAN_N: tl.constexpr, WIDTH: tl.constexpr):
    """The extent of WIDTH tiles of the plan, dead ones left out; beside a dead one, the rest is never wholly born."""
    num_tiles = slots // PLAN_N
    tiles = words + HEAD + 5 * slots
    living = tl.load(words + DEAD)
    first, last, end, fades = NEVER, 0, 0, NEVER
    for n in tl.static_range(WIDTH):
        at = tile * WIDTH + n
        inside = at < living
        first = tl.minimum(first, tl.load(tiles + at, mask=inside, other=NEVER))
        last = tl.maximum(last, tl.load(tiles + num_tiles + at, mask=inside, other=NEVER))
        end = tl.maximum(end, tl.load(tiles + 2 * num_tiles + at, mask=inside, other=0))
        fades = tl.minimum(fades, tl.load(tiles + 3 * num_tiles + at, mask=inside, other=NEVER))
    return first, last, end, fades


@triton.jit
def _store_gradients(dk, dv, dspan, dk_acc, dv_acc, dspan_acc, mask, used):
    tl.store(dk, dk_acc.to(dk.dtype.element_ty), mask=mask)
    tl.store(dv, dv_acc.to(dv.dtype.element_ty), mask=mask)
    tl.store(dspan, dspan_acc, mask=used)


@triton.jit(do_not_specialize=["kv_heads", "window", "splits", "num_rows", "row_words"])
def _memory_gradients(
    q, dy, lse, delta, k, v, words, q_pos, dq, dk, dv, dspan, sums, T, S, slots, kv_heads, group, heads, row_words, window,
    splits, num_rows, q_b, q_h, q_t, dy_b, dy_h, dy_t, qp_b, scale, log_scale, ramp, inv_ramp, ADD_DQ: tl.constexpr,
    SPLIT: tl.constexpr, PLAN_N: tl.constexpr, HAS_DOCS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One program per memory tile and `window` query tiles of its life; the longest-lived tiles come first.

    A tile that fits one window writes its gradients; the parts of a longer one add into `sums`, for `_finish`.
    """
    part, bh = tl.program_id(0) % splits, (tl.program_id(0) // splits % num_rows).to(tl.int64)
    tile = tl.program_id(0) // (splits * num_rows)
    b, h = bh // kv_heads, bh % kv_heads
    row = b * heads + h % heads
    words += row * row_words
    if tile * (BLOCK_N // PLAN_N) >= tl.load(words + CLASSES):
        return
    born_from, born_to, dies, fading = _extent(words, tile, slots, PLAN_N, BLOCK_N // PLAN_N)
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
    keys = words + HEAD + slots + slot
    first = tl.load(keys, mask=taken, other=NEVER)
    if BLOCK_N > PLAN_N:  # the second half may be dead
        first = tl.where(slot < tl.load(words + DEAD) * PLAN_N, first, NEVER)
    end = tl.load(keys + slots, mask=taken, other=0)
    born = tl.load(keys + 2 * slots, mask=taken, other=0)
    length = tl.load(keys + 3 * slots, mask=taken, other=0).to(tl.float32, bitcast=True)
    full_from = tl.minimum(born_to, T)  # padding slots are never born
    full_from = tl.minimum(tl.maximum(tl.cdiv(full_from, BLOCK_M), begin), stop)
    full_to = tl.minimum(tl.maximum(fading // BLOCK_M, full_from), stop)
    t_row = q_pos + b * qp_b
    base = tl.load(t_row)
    dk_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dspan_acc = tl.zeros([BLOCK_N], tl.float32)
    for g in range(group):
        q_head = h * group + g
        q_bh = bh * group + g
        lse_at, delta_at = lse + q_bh * T, delta + q_bh * T
        if ADD_DQ and not TMA:
            dq_at = dq + q_bh * T * D
        else:
            dq_at = dq
        dk_acc, dv_acc, dspan_acc = _walk_queries(
            dk_acc, dv_acc, dspan_acc, k_tile, v_tile, q, dy, lse_at, delta_at, dq_at, full_from, full_to, full_to, full_to,
            b, q_head, T, q_b, q_h, q_t, dy_b, dy_h, dy_t, t_row, base, first, end, born, length, scale, log_scale,
            ramp, inv_ramp, False, ADD_DQ, HAS_DOCS, D, D_PAD, BLOCK_M, PRECISION, TMA,
        )  # fmt: skip
        dk_acc, dv_acc, dspan_acc = _walk_queries(
            dk_acc, dv_acc, dspan_acc, k_tile, v_tile, q, dy, lse_at, delta_at, dq_at, begin, full_from, full_to, stop,
            b, q_head, T, q_b, q_h, q_t, dy_b, dy_h, dy_t, t_row, base, first, end, born, length, scale, log_scale,
            ramp, inv_ramp, True, ADD_DQ, HAS_DOCS, D, D_PAD, BLOCK_M, PRECISION, TMA,
        )  # fmt: skip
    index = tl.load(words + HEAD + slot, mask=taken, other=-1)
    d = tl.arange(0, D_PAD)
    mask = (index >= 0)[:, None] & (d[None, :] < D)
    dk_acc *= scale
    dspan_acc *= inv_ramp
    out = (bh * S + tl.maximum(index, 0))[:, None] * D + d[None, :]
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


@triton.jit(do_not_specialize=["kv_heads", "window", "row_words"])
def _long_tiles(
    words, dk, dv, dspan, sums, S, slots, kv_heads, heads, row_words, window, FINISH: tl.constexpr, PLAN_N: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Of tiles longer than a window: clear the sums before the parts are added, or round them into dk and dv after."""
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    words += (bh // kv_heads * heads + bh % kv_heads % heads) * row_words
    total = tl.load(words + CLASSES)
    if tile * (BLOCK_N // PLAN_N) >= total:
        return
    first, _, end, _ = _extent(words, tile, slots, PLAN_N, BLOCK_N // PLAN_N)
    if tl.cdiv(end, BLOCK_M) - first // BLOCK_M <= window:
        return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    index = tl.load(words + HEAD + slot, mask=slot < total * PLAN_N, other=-1)
    d = tl.arange(0, D_PAD)
    mask = (index >= 0)[:, None] & (d[None, :] < D)
    dk_sum = sums + (bh * slots + slot)[:, None] * D + d[None, :]
    dv_sum = dk_sum + tl.num_programs(1).to(tl.int64) * slots * D
    if FINISH:
        out = (bh * S + tl.maximum(index, 0))[:, None] * D + d[None, :]
        tl.store(dk + out, tl.load(dk_sum, mask=mask, other=0.0).to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + out, tl.load(dv_sum, mask=mask, other=0.0).to(dv.dtype.element_ty), mask=mask)
    else:
        zeros = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        tl.store(dk_sum, zeros, mask=mask)
        tl.store(dv_sum, zeros, mask=mask)
        tl.store(dspan + bh * S + index, tl.zeros([BLOCK_N], tl.float32), mask=index >= 0)


@dataclass(frozen=True)
class Backward:
    """One backward pass: what its kernels share. Each method runs one kernel."""

    dy: Tensor
    q: Tensor
    q_pos: Tensor
    y: Tensor
    lse: Tensor
    plan: Plan
    memories: int
    ramp: float
    scale: float
    has_docs: bool
    tuning: Tuning
    precision: str

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Key/value heads, query heads of each, and span rows per batch row."""
        kv_heads = self.plan.k.shape[1]
        return kv_heads, self.q.shape[1] // kv_heads, self.plan.words.shape[0] // self.q.shape[0]

    def _rows(self, launch: Launch) -> tuple:
        return tuple(query_source(x, launch.block_m, self.tuning.tma) for x in (self.q, self.dy))

    def _sorted(self, block_n: int) -> tuple:
        return tuple(memory_source(x, block_n, self.tuning.tma) for x in (self.plan.k, self.plan.v))

    def _numbers(self) -> tuple[int | float, ...]:
        strides = (*self.q.stride()[:3], *self.dy.stride()[:3], self.q_pos.stride(0))
        return *strides, self.scale, self.scale * LOG2E, self.ramp, 1 / self.ramp

    def _options(self, launch: Launch) -> dict[str, Any]:
        dim = self.q.shape[-1]
        shape = dict(D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK_M=launch.block_m)
        kind = dict(HAS_DOCS=self.has_docs, PRECISION=self.precision, TMA=self.tuning.tma)
        return dict(**shape, **kind, num_warps=launch.warps, num_stages=launch.stages)

    def delta(self) -> Tensor:
        """sum dy * y per query [B, Hq, T]."""
        batch, q_heads, queries, dim = self.q.shape
        out = torch.empty_like(self.lse)
        _delta[(triton.cdiv(queries, 64), batch * q_heads)](
            self.y, self.dy, out, queries, q_heads, *self.dy.stride()[:3], D=dim, D_PAD=triton.next_power_of_2(dim),
            BLOCK=64,
        )  # fmt: skip
        return out

    def query_gradient(self) -> tuple[Tensor, Tensor]:
        """dq [B, Hq, T, D], and delta [B, Hq, T] for the memories' gradients."""
        batch, q_heads, queries, _ = self.q.shape
        (_, group, heads), plan, tuning = self._heads, self.plan, self.tuning
        launch, delta = tuning.dq, torch.empty_like(self.lse)
        dq = torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device)
        _query_gradient[(triton.cdiv(queries, launch.block_m), batch * q_heads)](
            *self._rows(launch), self.y, self.lse, delta, *self._sorted(tuning.block_n), plan.words, self.q_pos, dq,
            queries, plan.k.shape[2], q_heads, group, heads, plan.words.shape[1], *self._numbers(),
            PLAN_M=tuning.forward.block_m, BLOCK_N=tuning.block_n, **self._options(launch),
        )  # fmt: skip
        return dq, delta

    def memory_gradients(self, delta: Tensor, dq: Tensor | None, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """dk and dv [B, Hkv, S, D], dspan [B, Hkv, S], and, where `dq` (float32) is given, dq added to it.

        splits: programs that may share a long-lived tile's queries; more than one add into float32 with atomics.
        """
        plan, launch, (kv_heads, group, heads) = self.plan, self.tuning.dkv, self._heads
        batch, queries, dim, slots = self.q.shape[0], self.q.shape[2], self.q.shape[3], plan.k.shape[2]
        like = dict(dtype=self.q.dtype, device=self.q.device)
        dk, dv = (torch.empty(batch, kv_heads, self.memories, dim, **like) for _ in range(2))
        dspan = torch.empty(batch, kv_heads, self.memories, dtype=torch.float32, device=self.q.device)
        sums = plan.k.new_empty(2, *plan.k.shape, dtype=torch.float32) if splits > 1 else dspan
        dq_rows = self.lse if dq is None else query_source(dq, launch.block_m, self.tuning.tma)
        plan_n, block_n = self.tuning.block_n, self.tuning.memories_per_program
        row_words, num_rows, num_tiles = plan.words.shape[1], batch * kv_heads, triton.cdiv(slots, block_n)
        window = triton.cdiv(triton.cdiv(queries, launch.block_m), splits)

        def long_tiles(finish: bool) -> None:
            _long_tiles[(num_tiles, num_rows)](
                plan.words, dk, dv, dspan, sums, self.memories, slots, kv_heads, heads, row_words, window, FINISH=finish,
                PLAN_N=plan_n, D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK_M=launch.block_m, BLOCK_N=block_n,
            )  # fmt: skip

        if splits > 1:
            long_tiles(finish=False)
        _memory_gradients[(num_tiles * num_rows * splits,)](
            *self._rows(launch), self.lse, delta, *self._sorted(block_n), plan.words, self.q_pos, dq_rows, dk, dv, dspan,
            sums, queries, self.memories, slots, kv_heads, group, heads, row_words, window, splits, num_rows,
            *self._numbers(), ADD_DQ=dq is not None, SPLIT=splits > 1, PLAN_N=plan_n, BLOCK_N=block_n,
            **self._options(launch),
        )  # fmt: skip
        if splits > 1:
            long_tiles(finish=True)
        return dk, dv, dspan

    def run(self, deterministic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and dspan (one part per key/value head)."""
        splits = 1 if deterministic else self.tuning.splits(self.q.shape[2])
        if self.tuning.fuse_dq and not deterministic:
            dq = torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device)
            parts = self.memory_gradients(self.delta(), dq, splits)
            return dq.to(self.q.dtype), *parts
        dq, delta = self.query_gradient()
        return dq, *self.memory_gradients(delta, None, splits)
