"""The declaration of a memory system, apart from its module. It needs the standard library only, so `--help` loads no torch.

A memory system is one folder of this package: `__init__.py` declares its settings and its `MemorySystem`, `layer.py` holds the
module. Everything else (the registry, `expire-span memories`, budgets of comparisons, the tables of the documentation, the
shared tests) reads the declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from expire_span.checks import Bound, Count, Natural, checked, require
from expire_span.field_docs import documented

Positions = Literal["rotary", "relative", "none"]


@documented
@dataclass(frozen=True)
@checked
class AttentionShape:
    """The width of a model's layers, their heads, and how attention sees positions."""

    dim: Count = 256
    """Width of the hidden state (C)."""
    heads: Count = 4
    """Query heads; must divide dim."""
    kv_heads: int | None = None
    """Key/value heads, each shared by heads / kv_heads query heads; None means as many as heads."""
    positions: Positions = "rotary"
    """How attention sees positions: rotary angles, a learned key embedding of the last `relative_window` distances, or not."""
    relative_window: Count = 256
    """How many distances have a learned key embedding (M), with positions=relative."""
    rotary_base: Annotated[float, Bound("be greater than 1", lambda x: x > 1)] = 10_000.0
    """Base of the rotary frequencies."""
    qk_norm: bool = True
    """Normalise queries and keys per head before the product."""
    head_gates: bool = False
    """Let each attention head scale its output by a learned gate of the hidden state, 2 sigmoid(w . x + b), which starts at 1.
    A head whose memories say nothing can then be silent, which softmax alone does not allow."""

    def __post_init__(self) -> None:
        require(self.dim % self.heads == 0, f"heads must divide dim, got heads {self.heads} and dim {self.dim}")
        kv = self.num_kv_heads
        divides = kv >= 1 and self.heads % kv == 0
        require(divides, f"kv_heads must divide heads, got kv_heads {kv} and heads {self.heads}")
        even = self.positions != "rotary" or self.head_dim % 2 == 0
        require(even, f"rotary positions need an even head dim, got {self.head_dim}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads


@documented
@dataclass(frozen=True)
@checked
class LayerShape(AttentionShape):
    """The shape of one layer: what every memory system is built from, beside its own settings."""

    depth: Natural = 0
    """Number of layers below this one; longformer's windows and bigbird's random blocks depend on it."""


@documented
@dataclass(frozen=True)
class StateSize:
    """The numbers from which the size of a state follows, for one batch row and one layer."""

    shape: LayerShape
    settings: Any
    element: int = 4
    """Bytes of one number (e in the formulas): 4 for float32."""

    @property
    def head(self) -> int:
        """Bytes of one memory's key and value in one key/value head."""
        return 2 * self.shape.head_dim * self.element

    @property
    def pair(self) -> int:
        """Bytes of one memory's keys and values in all key/value heads."""
        return self.shape.num_kv_heads * self.head


@documented
@dataclass(frozen=True)
class Budget:
    """How comparisons hold a system to a given number of memories per row and layer."""

    knob: str
    """Which setting decides the number of memories, in words."""
    settings: Callable[[Recipe, Any], Any] | None = None
    """A function of a `Recipe` and a number of memories that gives the system's settings; None where nothing can be set."""


@documented
@dataclass(frozen=True)
class Recipe:
    """The numbers of a run's recipe on which a system's settings under a budget may depend."""

    layers: int
    max_span: int
    ramp: int
    initial_span: float
    settings: Any
    """The recipe's `ExpireSpanConfig`; the defaults where the recipe uses another system."""


@documented
@dataclass(frozen=True)
class MemorySystem:
    """The declaration of one memory system. Formulas use n for steps so far, e for bytes of a number, H, Hkv and D as in the
    glossary."""

    settings: type
    """Frozen dataclass with a literal `kind`; the first line of its docstring is the rule."""
    layer: str
    """Where the module is: "package.module:Class". It is imported when a layer is first built."""
    state: str
    """Bytes that one row holds in one layer, as a formula for tables."""
    held: Callable[[StateSize, int], int]
    """The same as a function of the number of steps so far; an upper bound where spans are learned."""
    cost: str
    """Work for a sequence of T tokens, as a formula for tables."""
    budget: Budget
    """How comparisons hold the system to a given number of memories."""
    streaming: str = "exact"
    """In words, whether a sequence fed in pieces of any size gives the same outputs as fed whole."""
    training: str = "nothing"
    """In words, what queries see in training but not in streaming."""
    bounded: bool = True
    """Whether the size of the state has an upper bound."""
    receptive_field: Callable[[StateSize], int | None] = lambda size: None
    """The most steps back from which one layer reads; None where there is no limit."""
    scores_pairs: bool = True
    """Whether it computes a score for each pair of tokens, to which learned relative positions can be added."""
    learns_spans: bool = False
    """Whether spans are learned, so that a budget is held by the weight of the span loss."""
    operator: bool = False
    """Whether it runs on the expiring-attention operator."""
    example: dict[str, Any] = field(default_factory=dict)
    """Settings for the shared tests, so small that the system forgets, compresses or routes within sixty tokens; two layers
    of it must still read ten tokens back."""

    @property
    def kind(self) -> str:
        return self.settings.kind  # type: ignore[attr-defined]

    @property
    def rule(self) -> str:
        """What is remembered, in one line."""
        return (self.settings.__doc__ or "").strip().splitlines()[0]
