"""Backward pass, with scores recomputed from lse. p = m e^(s - lse), e = e^(s - lse), delta = sum dy * y:

    dv_i = sum_t p dy_t      ds = p (dp - delta) - eps e delta      dk_i = sum_t ds q_t      dq_t = sum_i ds k_i
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

from . import memory_gradients as by_memory
from . import query_gradient as by_query
from .forward import LOG2E, empty_rows, memory_source, query_source
from .launch import run_kernel
from .layout import Plan, power_of_2
from .tuning import Launch, Tuning


@triton.jit
def _delta(y, dy, delta, T, q_heads, dy_b, dy_h, dy_t, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    t, bh = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    b, h = bh // q_heads, bh % q_heads
    d = tl.arange(0, D_PAD)
    mask = (t[:, None] < T) & (d[None, :] < D)
    a = tl.load(y + ((b * T + t) * q_heads + h)[:, None] * D + d[None, :], mask=mask, other=0.0).to(tl.float32)
    g = tl.load(dy + b * dy_b + h * dy_h + t.to(tl.int64)[:, None] * dy_t + d[None, :], mask=mask, other=0.0)
    tl.store(delta + bh * T + t, tl.sum(a * g.to(tl.float32), 1), mask=t < T)


@dataclass(frozen=True)
class Backward:
    """One backward pass: what its kernels share. Each method runs one kernel."""

    dy: Tensor
    q: Tensor
    y: Tensor
    lse: Tensor
    plan: Plan
    memories: int
    ramp: float
    scale: float
    has_docs: bool
    tuning: Tuning
    precision: str
    table: Tensor | None = None
    eps: float = 0.0

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Key/value heads, query heads of each, and span rows per batch row."""
        kv_heads = self.plan.k.shape[1]
        return kv_heads, self.q.shape[1] // kv_heads, self.plan.words.shape[0] // self.q.shape[0]

    def _rows(self, launch: Launch) -> tuple:
        return tuple(query_source(x, launch.block_m, self.tuning.tma) for x in (self.q, self.dy))

    def _sorted(self, block_n: int) -> tuple:
        return tuple(memory_source(x, block_n, self.tuning.tma) for x in (self.plan.k, self.plan.v))

    @property
    def _table(self) -> Tensor:
        """The table, or a tensor that stands in for it and is never read."""
        return self.lse if self.table is None else self.table

    def _numbers(self) -> tuple[int | float, ...]:
        rows = (*self.q.stride()[:3], *self.dy.stride()[:3])
        return *rows, self.scale, self.scale * LOG2E

    def _options(self, launch: Launch) -> dict[str, Any]:
        dim = self.q.shape[-1]
        shape = dict(D=dim, D_PAD=power_of_2(dim), BLOCK_M=launch.block_m)
        window = 0 if self.table is None else self.table.shape[-1]
        kind = dict(
            MIN_AGE=self.plan.min_age,
            HAS_DOCS=self.has_docs,
            WINDOW=window,
            EPS=self.eps,
            PRECISION=self.precision,
            TMA=self.tuning.tma,
        )
        return dict(**shape, **kind, **launch.options)

    def delta(self) -> Tensor:
        """sum dy * y per query [B, Hq, T]."""
        batch, q_heads, queries, dim = self.q.shape
        out = torch.empty_like(self.lse)
        run_kernel(
            _delta, (-(-queries // 64), batch * q_heads),
            self.y, self.dy, out, queries, q_heads, *self.dy.stride()[:3], D=dim, D_PAD=power_of_2(dim),
            BLOCK=64,
        )  # fmt: skip
        return out

    def query_gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B, Hq, T, D]; delta [B, Hq, T] for the memories' gradients; the table's gradient, or nothing [0]."""
        batch, q_heads, queries, dim = self.q.shape
        (_, group, heads), plan, tuning = self._heads, self.plan, self.tuning
        launch, delta = tuning.dq, torch.empty_like(self.lse)
        dq = empty_rows(batch, q_heads, queries, dim, dtype=self.q.dtype, device=self.q.device)
        dtable = torch.zeros_like(self.table) if self.table is not None else dq.new_empty(0)
        run_kernel(
            by_query.query_gradient, (-(-queries // launch.block_m), batch * q_heads),
            *self._rows(launch), self.y, self.lse, delta, *self._sorted(tuning.block_n), plan.words,
            self._table, dtable, dq, queries, plan.k.shape[2], q_heads, group, heads, plan.words.shape[1], *self._numbers(), 1 / self.ramp,
            PLAN_M=tuning.forward.block_m, BLOCK_N=tuning.block_n, **self._options(launch),
        )  # fmt: skip
        return dq, delta, dtable

    def memory_gradients(self, delta: Tensor, dq: Tensor | None, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """dk and dv [B, Hkv, S, D], dspan [B, Hkv, S], and, where `dq` (float32) is given, dq added to it.

        splits: programs that may share a long-lived tile's queries; more than one add into float32 with atomics.
        """
        plan, launch, (kv_heads, group, heads) = self.plan, self.tuning.dkv, self._heads
        batch, queries, dim, slots = self.q.shape[0], self.q.shape[2], self.q.shape[3], plan.k.shape[2]
        like = dict(dtype=self.q.dtype, device=self.q.device)
        dk, dv = (empty_rows(batch, kv_heads, self.memories, dim, **like) for _ in range(2))
        dspan = torch.empty(batch, kv_heads, self.memories, dtype=torch.float32, device=self.q.device)
        sums = plan.k.new_empty(2, *plan.k.shape, dtype=torch.float32) if splits > 1 else dspan
        dq_rows = self.lse if dq is None else query_source(dq, launch.block_m, self.tuning.tma)
        plan_n, block_n = self.tuning.block_n, self.tuning.memories_per_program
        row_words, num_rows, num_tiles = plan.words.shape[1], batch * kv_heads, -(-slots // block_n)
        window = -(-queries // (launch.block_m * splits))

        def long_tiles(finish: bool) -> None:
            run_kernel(
                by_memory.long_tiles, (num_tiles, num_rows),
                plan.words, dk, dv, dspan, sums, self.memories, slots, kv_heads, heads, row_words, window, FINISH=finish,
                PLAN_N=plan_n, D=dim, D_PAD=power_of_2(dim), BLOCK_M=launch.block_m, BLOCK_N=block_n,
            )  # fmt: skip

        if splits > 1:
            long_tiles(finish=False)
        run_kernel(
            by_memory.memory_gradients, (num_tiles * num_rows * splits,),
            *self._rows(launch), self.lse, delta, *self._sorted(block_n), plan.words, self._table, dq_rows, dk,
            dv, dspan, sums, queries, self.memories, slots, kv_heads, group, heads, row_words, window, splits, num_rows,
            *self._numbers(), self.ramp, 1 / self.ramp, ADD_DQ=dq is not None, SPLIT=splits > 1, PLAN_M=self.tuning.forward.block_m, PLAN_N=plan_n, BLOCK_N=block_n,
            EVEN=queries % launch.block_m == 0, **self._options(launch),
        )  # fmt: skip
        if splits > 1:
            long_tiles(finish=True)
        return dk, dv, dspan

    def run(self, deterministic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv, dspan (one part per key/value head) and the table's gradient."""
        splits = 1 if deterministic else self.tuning.splits(self.q.shape[2])
        if self.tuning.fuse_dq and not deterministic and self.table is None:
            dq = empty_rows(*self.q.shape, dtype=torch.float32, device=self.q.device).zero_()
            parts = self.memory_gradients(self.delta(), dq, splits)
            return dq.to(self.q.dtype), *parts, dq.new_empty(0)
        dq, delta, dtable = self.query_gradient()
        return dq, *self.memory_gradients(delta, None, splits), dtable
