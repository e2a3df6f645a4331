"""Backward pass, with scores recomputed from lse. p = m e^(s - lse), e = e^(s - lse), delta = sum dy * y:

    dv_i = sum_t p dy_t      ds = p (dp - delta)      dk_i = sum_t ds q_t      dq_t = sum_i ds k_i
    dspan_i = sum over t on the ramp of e (dp - delta) / ramp            (never p / m: m may be tiny)

A memory is seen by one contiguous range of queries, so one program owns a memory tile, walks its queries and writes its
gradients once, without atomics. dq is added up on the way (atomically), or by a second, query-stationary kernel, which
is bitwise repeatable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import LOG2E, load_fate, load_queries, load_tile, memory_source, next_tile, query_source
from .lists import CLASSES, FULL_AT, MASKED_AT, WORDS, Plan
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
    dq, q, dy, lse, delta, k_source, v_source, first_row, runs, count, keys, spans, slots, q_index, t0, since, scale, ramp,
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
            first, end, life = load_fate(keys, spans, slots, slot, t0, ramp)
            x = life[None, :] - since[:, None]
            alive = (x > 0) & (q_index[:, None] >= first[None, :])
            if HAS_DOCS:
                alive = alive & (q_index[:, None] < end[None, :])
            p = tl.minimum(x * inv_ramp, 1.0) * tl.math.exp2(tl.where(alive, s, float("-inf")))
            p = tl.where(alive, p, 0.0)
        else:
            p = tl.math.exp2(s)
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        run, tile, left = next_tile(runs, run, tile, left)
    return dq


@triton.jit(do_not_specialize=["q_heads"])
def _query_gradient(
    q, dy, lse, delta, k, v, keys, spans, runs, q_pos, dq, T, slots, q_heads, group, heads, q_b, q_h, q_t, dy_b, dy_h,
    dy_t, qp_b, scale, log_scale, ramp, inv_ramp, HAS_DOCS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
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
    delta_tile = tl.load(delta + bh * T + q_index, mask=inside, other=0.0)
    t_row = q_pos + b * qp_b
    base = tl.load(t_row)
    t0 = (tl.load(t_row + qt * BLOCK_M) - base).to(tl.int32)
    t = (tl.load(t_row + q_index, mask=inside, other=0) - base).to(tl.int32)
    since = (t - t0).to(tl.float32)
    keys += row * 3 * slots
    spans += row * slots
    runs += (row * tl.num_programs(0) + qt) * WORDS
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, kv_bh * slots, runs + FULL_AT, tl.load(runs), keys, spans, slots,
        q_index, t0, since, log_scale, ramp, inv_ramp, False, HAS_DOCS, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    acc = _walk_tiles(
        acc, q_tile, dy_tile, lse_tile, delta_tile, k, v, kv_bh * slots, runs + MASKED_AT, tl.load(runs + 1), keys, spans,
        slots, q_index, t0, since, log_scale, ramp, inv_ramp, True, HAS_DOCS, D, D_PAD, BLOCK_N, PRECISION, TMA,
    )  # fmt: skip
    out = (bh * T + q_index)[:, None] * D + d[None, :]
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
            p = tl.where(alive, tl.minimum(x * inv_ramp, 1.0) * e, 0.0)
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


@triton.jit(do_not_specialize=["kv_heads", "window"])
def _memory_gradients(
    q, dy, lse, delta, k, v, order, keys, spans, tiles, class_tiles, q_pos, dq, dk, dv, dspan, T, S, slots, kv_heads,
    group, heads, window, q_b, q_h, q_t, dy_b, dy_h, dy_t, qp_b, scale, log_scale, ramp, inv_ramp, ADD_DQ: tl.constexpr,
    SPLIT: tl.constexpr, HAS_DOCS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tile, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    row = b * heads + h % heads
    if tile >= tl.load(class_tiles + row * (CLASSES + 1) + CLASSES):
        return
    num_tiles = slots // BLOCK_N
    tiles += row * 4 * num_tiles + tile
    begin = tl.load(tiles) // BLOCK_M
    stop = tl.cdiv(tl.load(tiles + 2 * num_tiles), BLOCK_M)
    if SPLIT:
        begin = tl.maximum(begin, tl.program_id(2) * window)
        stop = tl.minimum(stop, (tl.program_id(2) + 1) * window)
        if stop <= begin:
            return
    slot = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k, bh * slots + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
    v_tile = load_tile(v, bh * slots + tile * BLOCK_N, D, D_PAD, BLOCK_N, TMA)
    first = tl.load(keys + (row * 3) * slots + slot)
    end = tl.load(keys + (row * 3 + 1) * slots + slot)
    born = tl.load(keys + (row * 3 + 2) * slots + slot)
    length = tl.load(spans + row * slots + slot)
    full_from = tl.minimum(tl.load(tiles + num_tiles), T)  # padding slots are never born
    full_from = tl.minimum(tl.maximum(tl.cdiv(full_from, BLOCK_M), begin), stop)
    full_to = tl.minimum(tl.maximum(tl.load(tiles + 3 * num_tiles) // BLOCK_M, full_from), stop)
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
    index = tl.load(order + row * slots + slot)
    d = tl.arange(0, D_PAD)
    mask = (index >= 0)[:, None] & (d[None, :] < D)
    out = (bh * S + tl.maximum(index, 0))[:, None] * D + d[None, :]
    if SPLIT:
        tl.atomic_add(dk + out, dk_acc * scale, mask=mask, sem="relaxed")
        tl.atomic_add(dv + out, dv_acc, mask=mask, sem="relaxed")
        tl.atomic_add(dspan + bh * S + index, dspan_acc * inv_ramp, mask=index >= 0, sem="relaxed")
    else:
        tl.store(dk + out, (dk_acc * scale).to(dk.dtype.element_ty), mask=mask)
        tl.store(dv + out, dv_acc.to(dv.dtype.element_ty), mask=mask)
        tl.store(dspan + bh * S + index, dspan_acc * inv_ramp, mask=index >= 0)


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
        return kv_heads, self.q.shape[1] // kv_heads, self.plan.order.shape[0] // self.q.shape[0]

    def _rows(self, launch: Launch) -> tuple:
        return tuple(query_source(x, launch.block_m, self.tuning.tma) for x in (self.q, self.dy))

    def _sorted(self) -> tuple:
        return tuple(memory_source(x, self.tuning.block_n, self.tuning.tma) for x in (self.plan.k, self.plan.v))

    def _numbers(self) -> tuple[int | float, ...]:
        strides = (*self.q.stride()[:3], *self.dy.stride()[:3], self.q_pos.stride(0))
        return *strides, self.scale, self.scale * LOG2E, self.ramp, 1 / self.ramp

    def _options(self, launch: Launch) -> dict[str, Any]:
        dim, tuning = self.q.shape[-1], self.tuning
        shape = dict(D=dim, D_PAD=triton.next_power_of_2(dim), BLOCK_M=launch.block_m, BLOCK_N=tuning.block_n)
        kind = dict(HAS_DOCS=self.has_docs, PRECISION=self.precision, TMA=tuning.tma)
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

    def query_gradient(self, delta: Tensor) -> Tensor:
        """dq [B, Hq, T, D]."""
        batch, q_heads, queries, _ = self.q.shape
        _, group, heads = self._heads
        dq, plan, launch = (
            torch.empty(self.q.shape, dtype=self.q.dtype, device=self.q.device),
            self.plan,
            self.tuning.dq,
        )
        _query_gradient[(triton.cdiv(queries, launch.block_m), batch * q_heads)](
            *self._rows(launch), self.lse, delta, *self._sorted(), plan.keys, plan.spans, plan.runs, self.q_pos, dq,
            queries, plan.k.shape[2], q_heads, group, heads, *self._numbers(), **self._options(launch),
        )  # fmt: skip
        return dq

    def memory_gradients(self, delta: Tensor, dq: Tensor | None, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """dk and dv [B, Hkv, S, D], dspan [B, Hkv, S], and, where `dq` (float32) is given, dq added to it.

        splits: programs that share a memory tile's queries; more than one add into float32 with atomics.
        """
        plan, launch, (kv_heads, group, heads) = self.plan, self.tuning.dkv, self._heads
        batch, queries, dim, slots = self.q.shape[0], self.q.shape[2], self.q.shape[3], plan.k.shape[2]
        shape = (batch, kv_heads, self.memories)
        new, dtype = (torch.zeros, torch.float32) if splits > 1 else (torch.empty, self.q.dtype)
        dk, dv = (new((*shape, dim), dtype=dtype, device=self.q.device) for _ in range(2))
        dspan = new(shape, dtype=torch.float32, device=self.q.device)
        dq_rows = self.lse if dq is None else query_source(dq, launch.block_m, self.tuning.tma)
        window = triton.cdiv(triton.cdiv(queries, launch.block_m), splits)
        _memory_gradients[(slots // self.tuning.block_n, batch * kv_heads, splits)](
            *self._rows(launch), self.lse, delta, *self._sorted(), plan.order, plan.keys, plan.spans, plan.tiles,
            plan.class_tiles, self.q_pos, dq_rows, dk, dv, dspan, queries, self.memories, slots, kv_heads, group, heads,
            window, *self._numbers(), ADD_DQ=dq is not None, SPLIT=splits > 1, **self._options(launch),
        )  # fmt: skip
        return dk.to(self.q.dtype), dv.to(self.q.dtype), dspan

    def run(self, deterministic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and dspan (one part per key/value head)."""
        delta = self.delta()
        splits = 1 if deterministic else self.tuning.splits(self.q.shape[2])
        if self.tuning.fuse_dq and not deterministic:
            dq = torch.zeros(self.q.shape, dtype=torch.float32, device=self.q.device)
            parts = self.memory_gradients(delta, dq, splits)
            return dq.to(self.q.dtype), *parts
        return self.query_gradient(delta), *self.memory_gradients(delta, None, splits)
