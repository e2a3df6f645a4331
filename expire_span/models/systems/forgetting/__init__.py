"""Attention with forget gates, as in the Forgetting Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from expire_span.checks import Bound, Count, checked
from expire_span.models.systems.contract import Budget, MemorySystem


@dataclass(frozen=True)
@checked
class ForgettingConfig:
    """Never deletes, but fades: scores get the sum of log forget gates since the memory was written."""

    kind: Literal["forgetting"] = "forgetting"
    initial_gate: Annotated[float, Bound("lie between 0 and 1", lambda x: 0 < x < 1)] = 0.99
    """Forget gate of every head before training: the fraction of weight a memory keeps each step."""
    chunk: Count = 512
    """Queries that are scored at once; it does not change the result."""
    impl: Literal["auto", "torch", "fla"] = "auto"
    """torch: plain PyTorch; fla: the GPU kernel of the fla package, for blocks with no memory before them; auto: the kernel
    where it can run."""


SYSTEM = MemorySystem(
    ForgettingConfig,
    "expire_span.models.systems.forgetting.layer:Forgetting",
    state="n x (2 Hkv D e + 8 H + 12)",
    held=lambda s, n: n * (s.pair + 8 * s.shape.heads + 12) + 8 * s.shape.heads,
    cost="O(T^2)",
    budget=Budget("none: keeps everything"),
    bounded=False,
    example={"chunk": 13, "initial_gate": 0.8},
)
