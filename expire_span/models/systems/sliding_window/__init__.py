"""A sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, checked
from expire_span.models.systems.contract import Budget, MemorySystem


@dataclass(frozen=True)
@checked
class SlidingWindowConfig:
    """Every query reads the last `window` tokens, held in a ring of exactly that size."""

    kind: Literal["sliding_window"] = "sliding_window"
    window: Count = 512
    """Tokens a query reads, itself included."""


SYSTEM = MemorySystem(
    SlidingWindowConfig,
    "expire_span.models.systems.sliding_window.layer:SlidingWindow",
    state="window x (2 Hkv D e + 8)",
    held=lambda s, n: s.settings.window * (s.pair + 8) + 8,
    cost="O(T x window)",
    budget=Budget("window", lambda recipe, n: SlidingWindowConfig(window=n)),
    receptive_field=lambda s: s.settings.window - 1,
    example={"window": 11},
)
