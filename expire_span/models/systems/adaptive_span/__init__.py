"""Adaptive-Span: one learned span per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, Share, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe


@dataclass(frozen=True)
@checked
class AdaptiveSpanConfig:
    """A learned span per key/value head, the same for all its memories, with a soft edge."""

    kind: Literal["adaptive_span"] = "adaptive_span"
    max_span: Count = 1024
    """Longest span a head can learn, in steps (L)."""
    ramp: Count = 32
    """Soft edge of the mask, in steps (R)."""
    initial_span: Share = 0.1
    """Share of max_span that every head starts with."""


def _with_budget(recipe: Recipe, memories: int | None) -> AdaptiveSpanConfig:
    """Settings with the recipe's max_span and ramp; with a budget, all heads start with spans of that many memories."""
    start = recipe.initial_span if memories is None else min(memories / recipe.max_span, 1.0)
    return AdaptiveSpanConfig(max_span=recipe.max_span, ramp=recipe.ramp, initial_span=start)


SYSTEM = MemorySystem(
    AdaptiveSpanConfig,
    "expire_span.models.systems.adaptive_span.layer:AdaptiveSpan",
    state="per head: min(n, its span + ramp) x (2 D e + 12)",
    held=lambda s, n: min(n, s.settings.max_span + s.settings.ramp) * s.shape.num_kv_heads * (s.head + 12),
    cost="O(T x longest span)",
    budget=Budget("heads start at the budget, and the controller holds their mean there", _with_budget),
    receptive_field=lambda s: s.settings.max_span + s.settings.ramp - 1,
    learns_spans=True,
    operator=True,
    example={"max_span": 20, "ramp": 3, "initial_span": 0.3},
)
