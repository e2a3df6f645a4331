"""Routing Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, Natural, Share, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe, StateSize


@dataclass(frozen=True)
@checked
class RoutingConfig:
    """Tokens are routed to the nearest of learned centroids and read the last members of their own cluster."""

    kind: Literal["routing"] = "routing"
    clusters: Count = 16
    """Centroids per head; about the square root of the sequence length."""
    members: Count = 64
    """Members of a cluster that are kept and read (w)."""
    window: Count = 64
    """Tokens that the local heads read."""
    local_heads: Natural | None = None
    """Heads that read a window instead of a cluster; None means half."""
    decay: Share = 0.999
    """Share of the old centroid that a training step keeps; 1 freezes the centroids."""
    selection: Literal["recent", "top"] = "recent"
    """Training reads a cluster's last members, as streaming does, or its closest in the whole block (the original's, which
    looks ahead and reads no carried memory)."""


def _held(s: StateSize, n: int) -> int:
    m = s.settings
    local = s.shape.heads // 2 if m.local_heads is None else m.local_heads
    routed = (s.shape.heads - local) * m.clusters * m.members * (s.head + 8)
    return routed + m.window * (local * s.head + 8) + 8


def _with_budget(recipe: Recipe, memories: int) -> RoutingConfig:
    clusters = min(RoutingConfig().clusters, memories)
    return RoutingConfig(clusters=clusters, members=memories // clusters, window=memories)


SYSTEM = MemorySystem(
    RoutingConfig,
    "expire_span.models.systems.routing.layer:Routing",
    state="routed heads x clusters x members x (2 D e + 8), and window x local heads x 2 D e",
    held=_held,
    cost="O(T (members + window)) and a sort",
    budget=Budget("clusters x members, and the local heads' window", _with_budget),
    training="with selection=top: each cluster's closest tokens of the whole block, later ones included",
    example={"clusters": 3, "members": 5, "window": 7, "decay": 1.0},
)
