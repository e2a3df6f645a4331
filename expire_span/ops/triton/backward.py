"""Backward pass, with scores recomputed from lse. p = m e^(s - lse), e = e^(s - lse), delta = sum dy * y:

    dv_i = sum_t p dy_t      ds = p (dp - delta) - eps e delta      dk_i = sum_t ds q_t      dq_t = sum_i ds k_i
    dspan_i = sum over t on the ramp of e (dp - delta) / ramp            (never p / m: m may be tiny)

A memory is seen by one contiguous range of queries. So one program takes a memory tile, loops over its queries and writes the
tile's gradients once, without atomics. A second kernel, with one program per query tile, computes dq. Both are bitwise
repeatable. With soft caps, ds is also multiplied by 1 - tanh^2. Sinks are in lse, and their own gradient follows from lse and
delta. The queries of a long-lived memory tile may be split among several programs, whose partial sums are added by atomics;
with `deterministic` they are not split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import memory_gradients as by_memory
from . import query_gradient as by_query
from .forward import LOG2E, empty_rows, memory_source, query_source, squash
from .launch import run_kernel
from .layout import Plan, power_of_2
from .rule import inverse, is_sharp
from .tuning import Launch, Tuning


@dataclass(frozen=True)
class Backward:
    """One backward pass: the arguments that its kernels share, and a method for each kernel."""

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
    softcap: float = 0.0

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Number of key/value heads, of query heads for each, and of rows of spans per batch row."""
        kv_heads = self.plan.k.shape[1]
        return kv_heads, self.q.shape[1] // kv_heads, self.plan.words.shape[0] // self.q.shape[0]

    def _rows(self, launch: Launch) -> tuple:
        return tuple(query_source(x, launch.block_m, self.tuning.tma) for x in (self.q, self.dy))

    def _sorted(self, block_n: int) -> tuple:
        return tuple(memory_source(x, block_n, self.tuning.tma) for x in (self.plan.k, self.plan.v))

    @property
    def _table(self) -> Tensor:
        """The table of the relative keys' scores; without one, any tensor, since the kernels need an argument but never read it."""
        return self.lse if self.table is None else self.table

    def _numbers(self) -> tuple[int | float, ...]:
        rows = (*self.q.stride()[:3], *self.dy.stride()[:3])
        return *rows, self.scale, (self.softcap or self.scale) * LOG2E

    def _options(self, launch: Launch) -> dict[str, Any]:
        dim = self.q.shape[-1]
        shape = dict(D=dim, D_PAD=power_of_2(dim), BLOCK_M=launch.block_m)
        window = 0 if self.table is None else self.table.shape[-1]
        kind = dict(
            MIN_AGE=self.plan.min_age,
            SHARP=is_sharp(self.ramp),
            HAS_DOCS=self.has_docs,
            WINDOW=window,
            EPS=self.eps,
            SQUASH=squash(self.scale, self.softcap),
            PRECISION=self.precision,
            TMA=self.tuning.tma,
        )
        return dict(**shape, **kind, **launch.options)

    def query_gradient(self) -> tuple[Tensor, Tensor, Tensor]:
        """dq [B, Hq, T, D]; delta [B, Hq, T], which `memory_gradients` needs; the table's gradient, of shape [0] without a table."""
        batch, q_heads, queries, dim = self.q.shape
        (_, group, heads), plan, tuning = self._heads, self.plan, self.tuning
        launch, delta = tuning.dq, torch.empty_like(self.lse)
        dq = empty_rows(batch, q_heads, queries, dim, dtype=self.q.dtype, device=self.q.device)
        dtable = torch.zeros_like(self.table) if self.table is not None else dq.new_empty(0)
        run_kernel(
            by_query.query_gradient, (-(-queries // launch.block_m), batch * q_heads),
            *self._rows(launch), self.y, self.lse, *self._sorted(tuning.block_n), plan.words, self._table,
            delta, dtable, dq, queries, plan.k.shape[2], q_heads, group, heads, plan.words.shape[1], *self._numbers(), inverse(self.ramp),
            PLAN_M=tuning.forward.block_m, BLOCK_N=tuning.block_n, **self._options(launch),
        )  # fmt: skip
        return dq, delta, dtable

    def memory_gradients(self, delta: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
        """dk and dv [B, Hkv, S, D] and dspan [B, Hkv, S].

        splits: number of programs among which a long-lived tile's queries are split. With more than one, the partial sums of such
        tiles are added by atomics into float32 `sums`, which are cleared before and rounded into dk and dv after.
        """
        kv_heads, group, heads = self._heads
        (batch, _, queries, dim), launch = self.q.shape, self.tuning.dkv
        like = dict(dtype=self.q.dtype, device=self.q.device)
        dk, dv = (empty_rows(batch, kv_heads, self.memories, dim, **like) for _ in range(2))
        dspan = torch.empty(batch, kv_heads, self.memories, dtype=torch.float32, device=self.q.device)
        sums = self.plan.k.new_empty(2, *self.plan.k.shape, dtype=torch.float32) if splits > 1 else dspan
        out = (dk, dv, dspan, sums)
        window = -(-queries // (launch.block_m * splits))  # query tiles per program
        if splits > 1:
            self._run_long_tiles(out, window, finish=False)
        block_n = self.tuning.memories_per_program
        slots, row_words, num_rows = self.plan.k.shape[2], self.plan.words.shape[1], batch * kv_heads
        read = (*self._rows(launch), self.lse, delta, *self._sorted(block_n), self.plan.words, self._table)
        sizes = (queries, self.memories, slots, kv_heads, group, heads, row_words, window, splits, num_rows)
        run_kernel(
            by_memory.memory_gradients, (-(-slots // block_n) * num_rows * splits,),
            *read, *out, *sizes, *self._numbers(), self.ramp / 2, inverse(self.ramp), SPLIT=splits > 1,
            PLAN_M=self.tuning.forward.block_m, PLAN_N=self.tuning.block_n, BLOCK_N=block_n,
            EVEN=queries % launch.block_m == 0, **self._options(launch),
        )  # fmt: skip
        if splits > 1:
            self._run_long_tiles(out, window, finish=True)
        return dk, dv, dspan

    def _run_long_tiles(self, out: tuple[Tensor, Tensor, Tensor, Tensor], window: int, finish: bool) -> None:
        """Clear the sums of tiles that live longer than `window` query tiles, or round them into dk and dv."""
        (kv_heads, _, heads), (slots, dim) = self._heads, self.plan.k.shape[2:]
        block_n = self.tuning.memories_per_program
        sizes = (self.memories, slots, kv_heads, heads, self.plan.words.shape[1], window)
        run_kernel(
            by_memory.long_tiles, (-(-slots // block_n), self.q.shape[0] * kv_heads),
            self.plan.words, *out, *sizes, FINISH=finish, PLAN_N=self.tuning.block_n, D=dim, D_PAD=power_of_2(dim),
            BLOCK_M=self.tuning.dkv.block_m, BLOCK_N=block_n,
        )  # fmt: skip

    def run(self, deterministic: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv, dspan [B, Hkv, S], the table's gradient, and delta [B, Hq, T]."""
        splits = 1 if deterministic else self.tuning.splits(self.q.shape[2])
        dq, delta, dtable = self.query_gradient()
        return dq, *self.memory_gradients(delta, splits), dtable, delta
