"""Block sizes by head dim and dtype: a small table, looked up once per call, never timed in a run.

Half precision at head dims 64 and 128 was chosen from measurements: 128 by `benchmarks/kernel_check.py`, 64 on spans as training
has them (docs/log.md, "Masked tiles"). The other entries compile and are correct, but were not compared with alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Launch:
    """Launch parameters of one kernel: queries per tile, warps per program, pipeline depth, limit of registers per thread."""

    block_m: int
    warps: int = 4
    stages: int = 2
    registers: int | None = None
    """Limit of registers per thread; None leaves it to the compiler. Fewer let more programs share a multiprocessor."""

    @property
    def options(self) -> dict[str, int]:
        """The same as keyword arguments of a Triton launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of the three kernels. The block_m of dq and dkv must divide that of the forward pass, whose plan they use."""

    block_n: int
    """Memories per tile."""
    forward: Launch
    dq: Launch
    dkv: Launch
    wide: int = 1
    """Neighbouring memory tiles that one program of the dkv kernel treats as one: 1 or 2."""
    tma: bool = False
    """Read tiles through tensor descriptors (the copy engine of Hopper and later)."""
    split_at: int = 4096
    """The queries of a memory tile that more than this many see are split among several programs, to balance the load."""

    def splits(self, queries: int) -> int:
        """Programs per memory tile in the dkv kernel."""
        return max(1, min(8, -(-queries // self.split_at)))

    @property
    def memories_per_program(self) -> int:
        """Memories that one program of the dkv kernel takes."""
        return self.block_n * self.wide

    def __post_init__(self) -> None:
        assert self.forward.block_m % self.dq.block_m == 0, (self.forward, self.dq)
        assert self.forward.block_m % self.dkv.block_m == 0, (self.forward, self.dkv)
        assert self.wide in (1, 2), self.wide


_HALF = {
    32: Tuning(64, Launch(128, 4, 3), Launch(128, 4, 3), Launch(64, 4, 3)),
    64: Tuning(64, Launch(64, 4, 2, 128), Launch(64, 4, 2, 128), Launch(64, 4, 3), split_at=8192),
    128: Tuning(64, Launch(128, 8, 3), Launch(64, 4, 2), Launch(64, 8, 2), wide=2, tma=True, split_at=8192),
    256: Tuning(32, Launch(64, 8, 2), Launch(64, 8, 1), Launch(32, 8, 1)),
}
_HALF_RELATIVE = {64: Tuning(64, Launch(64, 4, 3), Launch(64, 4, 2), Launch(32, 4, 3))}
_SINGLE = {
    32: Tuning(32, Launch(64, 4, 2), Launch(64, 4, 2), Launch(32, 4, 2)),
    64: Tuning(32, Launch(32, 8, 1), Launch(32, 8, 1), Launch(32, 8, 1)),
    128: Tuning(32, Launch(32, 8, 1), Launch(32, 8, 1), Launch(16, 8, 1)),
    256: Tuning(16, Launch(16, 8, 1), Launch(16, 8, 1), Launch(16, 8, 1)),
}
_override: Tuning | None = None


def choose(dim: int, dtype: torch.dtype, relative: bool = False) -> Tuning:
    """The table's entry for a head dim and dtype; head dim 96 runs as 128. relative: with relative keys, which need more registers."""
    if _override is not None:
        return _override
    padded = 128 if dim == 96 else dim
    table = _SINGLE if dtype == torch.float32 else _HALF | _HALF_RELATIVE if relative else _HALF
    return table[padded]


def override(tuning: Tuning | None) -> None:
    """Run everything with one choice (benchmarks and tests), or go back to the table with None."""
    global _override
    _override = tuning


def dot_precision(dtype: torch.dtype) -> str:
    """Triton's input precision: float32 products are exact unless PyTorch is set to allow TF32."""
    exact = dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"
