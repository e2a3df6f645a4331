"""Reformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from expire_span.checks import Bound, Count, Natural, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe


@dataclass(frozen=True)
@checked
class ReformerConfig:
    """Queries are hashed into buckets and read the last members of their own bucket; several rounds are merged."""

    kind: Literal["reformer"] = "reformer"
    buckets: Annotated[int, Bound("be 1 or even", lambda x: x == 1 or (x > 0 and x % 2 == 0))] = 16
    """Buckets per round: 1, or an even number."""
    rounds: Count = 2
    """Independent hashes whose results are merged."""
    members: Count = 64
    """Members of a bucket that are kept and read."""
    selection: Literal["recent", "chunks"] = "recent"
    """Training reads a bucket's last members, as streaming does, or the own and the previous chunk of the sorted block (the
    original's, where later tokens shift the chunks)."""
    seed: Natural = 0
    """Draws the hashes; they are saved with the weights."""


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
