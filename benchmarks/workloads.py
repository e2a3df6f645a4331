"""The operator's workloads: shapes and spans whose cost is compared, and how to time them on a GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

RAMP = 128.0


@dataclass(frozen=True)
class Workload:
    """Shapes B, H, T, D, and spans: a random share of tokens lives for ever, the others for `short` steps."""

    batch: int
    heads: int
    queries: int
    dim: int
    share: float = 1.0
    short: float = 0.0

    @property
    def name(self) -> str:
        spans = (
            "all live"
            if self.share == 1
            else f"{100 * self.share:g}% / {self.short:.0f}"
            if self.share
            else f"{self.short:.0f}"
        )
        return f"{self.batch},{self.heads},{self.queries},{self.dim} {spans}"

    def tensors(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        g = torch.Generator(device).manual_seed(0)
        shape = (self.batch, self.heads, self.queries, self.dim)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype, generator=g) for _ in range(3))
        lucky = torch.rand(self.batch, self.queries, device=device, generator=g) < self.share
        span = torch.where(lucky, 2.0 * self.queries, self.short)
        pos = torch.arange(self.queries, device=device)
        return dict(q=q, k=k, v=v, span=span, q_pos=pos, k_pos=pos)


SHAPES_64 = ((4, 8, 16384, 64), (1, 8, 65536, 64))
SPANS = ((1.0, 0.0), (0.0, 1024.0), (0.02, 128.0), (0.05, 256.0), (0.2, 256.0))
ANCHORS = [
    *(Workload(*shape, *spans) for shape in SHAPES_64 for spans in SPANS),
    Workload(4, 8, 16384, 128),
    Workload(4, 8, 16384, 128, 0.02, 128.0),
]


def milliseconds(run: Callable[[], object], budget_ms: float = 60.0, most: int = 20) -> float:
    """Median time of one call on the GPU, after a warm-up call."""
    run()
    torch.cuda.synchronize()
    first = _timed(run)
    count = max(3, min(most, int(budget_ms / max(first, 1e-3))))
    return statistics.median(_timed(run) for _ in range(count))


def _timed(run: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
