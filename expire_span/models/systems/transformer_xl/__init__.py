"""A fixed span, as in Transformer-XL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, checked
from expire_span.models.systems.contract import Budget, MemorySystem


@dataclass(frozen=True)
@checked
class TransformerXLConfig:
    """Fixed span: every query reads the last `span` steps, itself included; older memories are deleted."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    span: Count = 512
    """How many steps a memory lives, its own included (L)."""


SYSTEM = MemorySystem(
    TransformerXLConfig,
    "expire_span.models.systems.transformer_xl.layer:TransformerXL",
    state="min(n, span) x (2 Hkv D e + 12)",
    held=lambda s, n: min(n, s.settings.span) * (s.pair + 12),
    cost="O(T x span)",
    budget=Budget("span", lambda recipe, n: TransformerXLConfig(span=n)),
    receptive_field=lambda s: s.settings.span - 1,
    operator=True,
    example={"span": 11},
)
