"""Block sizes that `benchmarks.kernel_check` checks and times."""

from __future__ import annotations

from dataclasses import dataclass

from expire_span.ops.triton.tuning import Launch, Tuning

PLAN_N = 64
"""Memories per tile of the plan."""


@dataclass(frozen=True)
class Candidate:
    """One way to run one kernel."""

    kernel: str  # forward, dq or dkv
    dim: int
    block_n: int  # memories per program: one tile of the plan (64), or two for dkv
    block_m: int
    warps: int
    stages: int
    tma: bool

    @property
    def tuning(self) -> Tuning:
        launch = Launch(self.block_m, self.warps, self.stages)
        plan_m = Launch(self.block_m if self.kernel in ("forward", "dq") else 128)
        forward, dq = (launch if self.kernel == name else plan_m for name in ("forward", "dq"))
        dkv = launch if self.kernel == "dkv" else Launch(64)
        wide = self.block_n // PLAN_N
        return Tuning(PLAN_N, forward, dq, dkv, wide, tma=self.tma)

    @property
    def name(self) -> str:
        tma = " tma" if self.tma else ""
        return f"{self.kernel} D{self.dim} n{self.block_n} m{self.block_m} w{self.warps} s{self.stages}{tma}"


def candidates() -> list[Candidate]:
    """The block sizes, warps and stages to try: (block_n, block_m, warps, stages)."""
    tables = {
        ("forward", 64): [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 8, 3)],
        ("dq", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 2), (64, 128, 4, 3)],
        ("dkv", 64): [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3),
                      (128, 128, 8, 2)],
        ("forward", 128): [(64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3)],
        ("dq", 128): [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (64, 128, 8, 3)],
        ("dkv", 128): [(64, 64, 4, 1), (64, 64, 4, 2), (128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2)],
    }  # fmt: skip
    found = []
    for (kernel, dim), rows in tables.items():
        for row in rows:
            found += [Candidate(kernel, dim, *row, tma) for tma in (True, False)]
    return found
