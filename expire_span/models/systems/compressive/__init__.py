"""Compressive memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, checked, require
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe, StateSize


@dataclass(frozen=True)
@checked
class CompressiveConfig:
    """A window of raw memories; groups that leave it are pooled to one, and live on in a second queue."""

    kind: Literal["compressive"] = "compressive"
    window: Count = 256
    """Steps for which a memory is kept unpooled; it is pooled together with its group, so up to rate - 1 steps later."""
    compressed: Count = 256
    """Number of pooled memories that are kept."""
    rate: Count = 4
    """Number of memories that are pooled into one (c)."""
    pooling: Literal["mean", "max", "conv"] = "mean"
    """How a group's hidden states are pooled: mean, maximum, or a learned convolution."""
    reconstruction: bool = False
    """Add the attention-reconstruction loss: the current queries should read the same from pooled memories as from raw ones. It
    trains the pooling only."""

    def __post_init__(self) -> None:
        learned = not self.reconstruction or self.pooling == "conv"
        require(learned, f"reconstruction trains a learned pooling, got pooling {self.pooling}; use conv")


def _held(s: StateSize, n: int) -> int:
    c = s.settings.rate
    raw = c * -(-(s.settings.window + c - 1) // c)
    slots = raw + c - 1 + s.settings.compressed + raw // c
    return slots * (s.pair + 8) + (c - 1) * s.shape.dim * s.element + 8


def _receptive_field(s: StateSize) -> int:
    """The window, the rest of the group that its end lies in, and the pooled groups."""
    return s.settings.window + s.settings.rate - 2 + s.settings.rate * s.settings.compressed


def _with_budget(recipe: Recipe, memories: int) -> CompressiveConfig:
    window = max(1, memories // 2)
    return CompressiveConfig(window=window, compressed=max(1, memories - window))


SYSTEM = MemorySystem(
    CompressiveConfig,
    "expire_span.models.systems.compressive.layer:Compressive",
    state="(window + compressed + window / rate, rounded up to groups) x (2 Hkv D e + 8)",
    held=_held,
    cost="O(T x (window + compressed))",
    budget=Budget("window and compressed, half each", _with_budget),
    receptive_field=_receptive_field,
    example={"window": 7, "compressed": 5, "rate": 3, "pooling": "conv", "reconstruction": True},
)
