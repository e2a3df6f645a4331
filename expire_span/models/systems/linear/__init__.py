"""Linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, checked
from expire_span.models.systems.contract import Budget, MemorySystem, StateSize


@dataclass(frozen=True)
@checked
class LinearConfig:
    """Linear attention: running sums of phi(k) v and phi(k), with phi = elu + 1; rotary positions turn phi."""

    kind: Literal["linear"] = "linear"
    chunk: Count = 64
    """Tokens that training computes at once; it does not change the result."""


def sums_held(s: StateSize, features: int) -> int:
    """Bytes of the running sums with `features` features per head, and of the count of tokens."""
    return s.shape.num_kv_heads * features * (s.shape.head_dim + 1) * s.element + 8


SYSTEM = MemorySystem(
    LinearConfig,
    "expire_span.models.systems.linear.layer:Linear",
    state="Hkv D (D + 1) e",
    held=lambda s, n: sums_held(s, s.shape.head_dim),
    cost="O(T D^2)",
    budget=Budget("none: the head dim decides"),
    scores_pairs=False,
    example={"chunk": 16},
)
