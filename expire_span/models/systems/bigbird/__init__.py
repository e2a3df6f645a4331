"""BigBird, causal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, Natural, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe


@dataclass(frozen=True)
@checked
class BigBirdConfig:
    """The last blocks, the first blocks, and some random earlier blocks that a fixed seed picks."""

    kind: Literal["bigbird"] = "bigbird"
    block: Count = 64
    """Tokens of a block."""
    window_blocks: Count = 3
    """How many of the last blocks are read, the query's own included."""
    global_blocks: Natural = 1
    """How many first blocks are read by all."""
    random_blocks: Natural = 2
    """How many random earlier blocks each query block reads."""
    seed: Natural = 0
    """Picks the random blocks."""


def _with_budget(recipe: Recipe, memories: int) -> BigBirdConfig:
    base = BigBirdConfig()
    blocks = base.window_blocks + base.global_blocks + base.random_blocks
    return BigBirdConfig(block=max(1, memories // blocks))


SYSTEM = MemorySystem(
    BigBirdConfig,
    "expire_span.models.systems.bigbird.layer:BigBird",
    state="n x (2 Hkv D e + 12): any past block may be drawn later",
    held=lambda s, n: n * (s.pair + 12) + 8,
    cost="O(T x block x (window + global + random blocks))",
    budget=Budget("block: tokens read, of a memory that keeps everything", _with_budget),
    bounded=False,
    example={"block": 4, "window_blocks": 2},
)
