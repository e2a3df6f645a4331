"""Reformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import checked, require
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe, at_least


@dataclass(frozen=True)
@checked
class ReformerConfig:
    """Queries are hashed into buckets and read the last members of their own bucket; several rounds are merged."""

    kind: Literal["reformer"] = "reformer"
    buckets: int = 16
    """Buckets per round: 1, or an even number."""
    rounds: int = 2
    """Independent hashes whose results are merged."""
    members: int = 64
    """Members of a bucket that are kept and read."""
    selection: Literal["recent", "chunks"] = "recent"
    """Training reads a bucket's last members, as streaming does, or the own and the previous chunk of the sorted block (the
    original's, where later tokens shift the chunks)."""
    seed: int = 0
    """Draws the hashes; they are saved with the weights."""

    def __post_init__(self) -> None:
        at_least(self, 1, "buckets", "rounds", "members")
        at_least(self, 0, "seed")
        require(self.buckets == 1 or self.buckets % 2 == 0, f"buckets must be 1 or even, got {self.buckets}")


def _with_budget(recipe: Recipe, memories: int) -> ReformerConfig:
    base = ReformerConfig()
    buckets = min(base.buckets, 2 * max(1, memories // (2 * base.rounds)))
    return ReformerConfig(buckets=buckets, members=max(1, memories // (buckets * base.rounds)))


SYSTEM = MemorySystem(
    ReformerConfig,
    "expire_span.models.systems.reformer.layer:Reformer",
    state="rounds x H x buckets x members x (2 D e + 8)",
    held=lambda s, n: s.settings.rounds * s.shape.heads * s.settings.buckets * s.settings.members * (s.head + 8),
    cost="O(T x rounds x members) and a sort",
    budget=Budget("rounds x buckets x members", _with_budget),
    training="with selection=chunks: chunks of the sorted block, whose borders later tokens shift",
    example={"buckets": 4, "members": 5},
)
