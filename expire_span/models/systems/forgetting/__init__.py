"""Attention with forget gates, as in the Forgetting Transformer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import checked, require
from expire_span.models.systems.contract import Budget, MemorySystem, at_least


@dataclass(frozen=True)
@checked
class ForgettingConfig:
    """Never deletes, but fades: scores get the sum of log forget gates since the memory was written."""

    kind: Literal["forgetting"] = "forgetting"
    initial_gate: float = 0.99
    """Forget gate of every head before training: the fraction of weight a memory keeps each step."""
    chunk: int = 512
    """Queries that are scored at once; it does not change the result."""
    impl: Literal["auto", "torch", "fla"] = "auto"
    """torch: plain PyTorch; fla: the GPU kernel of the fla package, for blocks with no memory before them; auto: the kernel
    where it can run."""

    def __post_init__(self) -> None:
        require(0 < self.initial_gate < 1, f"initial_gate must lie between 0 and 1, got {self.initial_gate}")
        at_least(self, 1, "chunk")


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
