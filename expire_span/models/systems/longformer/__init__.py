"""Longformer, causal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from expire_span.checks import Count, Natural, at_least, checked
from expire_span.models.systems.contract import Budget, MemorySystem, Recipe, StateSize


@dataclass(frozen=True)
@checked
class LongformerConfig:
    """A window that grows with depth, some heads dilated, and global first tokens that all queries read."""

    kind: Literal["longformer"] = "longformer"
    window: Count = 128
    """Tokens a query reads in the first layer, itself included."""
    growth: Annotated[float, at_least(1)] = 1.5
    """Each layer's window is the one below times this."""
    max_window: Count = 1024
    """No layer's window is larger."""
    dilation: Count = 4
    """Dilated heads read every d-th token, for this d, and so see d times further back."""
    dilated_heads: Natural = 0
    """Number of key/value heads that are dilated."""
    global_tokens: Natural = 1
    """The first tokens of a row that every later query reads."""


def window_at(settings: LongformerConfig, depth: int) -> int:
    """Tokens that a query reads in the layer with `depth` layers below it."""
    return min(round(settings.window * settings.growth**depth), settings.max_window)


def _receptive_field(s: StateSize) -> int | None:
    m = s.settings
    return None if m.global_tokens else (window_at(m, s.shape.depth) - 1) * (m.dilation if m.dilated_heads else 1)


def _held(s: StateSize, n: int) -> int:
    m, window = s.settings, window_at(s.settings, s.shape.depth)
    near, far = s.shape.num_kv_heads - m.dilated_heads, m.dilated_heads
    rings = sum(size * (heads * s.head + 8) for heads, size in ((near, window), (far, window * m.dilation)) if heads)
    return rings + m.global_tokens * (s.pair + 8) + 8


def _with_budget(recipe: Recipe, memories: int) -> LongformerConfig:
    """Windows that grow fourfold from the first layer to the last and are `memories` tokens on average."""
    growth = 4 ** (1 / (recipe.layers - 1)) if recipe.layers > 1 else 1.0
    window = round((memories - 1) * recipe.layers / sum(growth**n for n in range(recipe.layers)))
    return LongformerConfig(window=max(1, window), growth=growth, max_window=4 * memories, global_tokens=1)


SYSTEM = MemorySystem(
    LongformerConfig,
    "expire_span.models.systems.longformer.layer:Longformer",
    state="per head: window x dilation x 2 D e, and global_tokens x 2 Hkv D e",
    held=_held,
    cost="O(T x (window + global_tokens))",
    budget=Budget("window, the mean over layers", _with_budget),
    receptive_field=_receptive_field,
    example={"window": 5, "dilation": 3, "dilated_heads": 1, "global_tokens": 3},
)
