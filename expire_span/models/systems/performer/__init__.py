"""Performer: linear attention with random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, Natural, checked
from expire_span.models.systems.contract import Budget, MemorySystem
from expire_span.models.systems.linear import sums_held


@dataclass(frozen=True)
@checked
class PerformerConfig:
    """Linear attention whose positive random features estimate softmax attention without bias."""

    kind: Literal["performer"] = "performer"
    features: Count = 128
    """Random features per head; more give a better estimate."""
    seed: Natural = 0
    """Draws the features; they are saved with the weights."""
    chunk: Count = 64
    """Tokens that training computes at once; it does not change the result."""


SYSTEM = MemorySystem(
    PerformerConfig,
    "expire_span.models.systems.performer.layer:Performer",
    state="Hkv features (D + 1) e",
    held=lambda s, n: sums_held(s, s.settings.features),
    cost="O(T D features)",
    budget=Budget("features: the bytes of so many memories", lambda recipe, n: PerformerConfig(features=2 * n)),
    scores_pairs=False,
    example={"features": 20, "chunk": 16},
)
