"""Full attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import checked
from expire_span.models.systems.contract import Budget, MemorySystem


@dataclass(frozen=True)
@checked
class FullConfig:
    """Never forgets: every query reads every earlier token."""

    kind: Literal["full"] = "full"


SYSTEM = MemorySystem(
    FullConfig,
    "expire_span.models.systems.full.layer:Full",
    state="n x (2 Hkv D e + 12)",
    held=lambda s, n: n * (s.pair + 12),
    cost="O(T^2)",
    budget=Budget("none: keeps everything"),
    bounded=False,
    operator=True,
)
