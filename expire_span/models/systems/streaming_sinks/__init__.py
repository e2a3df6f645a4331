"""Attention sinks and a window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, Natural, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe


@dataclass(frozen=True)
@checked
class StreamingSinksConfig:
    """The first tokens of a row, and the last `window`."""

    kind: Literal["streaming_sinks"] = "streaming_sinks"
    sinks: Natural = 4
    """First tokens that stay for ever (k)."""
    window: Count = 508
    """Tokens a query reads besides, itself included."""


def _with_budget(recipe: Recipe, memories: int) -> StreamingSinksConfig:
    sinks = min(StreamingSinksConfig().sinks, memories // 2)
    return StreamingSinksConfig(sinks=sinks, window=memories - sinks)


SYSTEM = MemorySystem(
    StreamingSinksConfig,
    "expire_span.models.systems.streaming_sinks.layer:StreamingSinks",
    state="(sinks + window) x (2 Hkv D e + 8)",
    held=lambda s, n: (s.settings.sinks + s.settings.window) * (s.pair + 8) + 8,
    cost="O(T x (window + sinks))",
    budget=Budget("sinks and window together", _with_budget),
    receptive_field=lambda s: None if s.settings.sinks else s.settings.window - 1,
    example={"sinks": 3, "window": 7},
)
