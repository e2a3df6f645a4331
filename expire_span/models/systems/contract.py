"""What a memory system says about itself, beside its module. Standard library only, so that `--help` needs no torch.

A memory system is one folder of this package: `__init__.py` declares its settings and its `MemorySystem`, `layer.py` holds the
module. Everything else (the registry, `expire-span memories`, budgets of comparisons, the tables of the documentation, the
shared tests) reads the declaration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal

from expire_span.checks import at_least, checked, require
from expire_span.field_docs import documented

Positions = Literal["rotary", "relative", "none"]


@documented
@dataclass(frozen=True)
@checked
class AttentionShape:
    """The width of the layers of a model and how their heads see positions."""

    dim: int = 256
    """Width of the hidden state (C)."""
    heads: int = 4
    """Query heads; must divide dim."""
    kv_heads: int | None = None
    """Key/value heads, each shared by heads / kv_heads query heads; None means as many as heads."""
    positions: Positions = "rotary"
    """Rotary angles, or a learned key embedding for the last `relative_window` distances, or nothing."""
    relative_window: int = 256
    """How many distances have a learned key embedding (M), with positions=relative."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    qk_norm: bool = True
    """Normalise queries and keys per head before the product."""

    def __post_init__(self) -> None:
        require(self.dim >= 1, f"dim must be at least 1, got {self.dim}")
        require(self.heads >= 1, f"heads must be at least 1, got {self.heads}")
        require(self.dim % self.heads == 0, f"heads must divide dim, got heads {self.heads} and dim {self.dim}")
        kv = self.num_kv_heads
        divides = kv >= 1 and self.heads % kv == 0
        require(divides, f"kv_heads must divide heads, got kv_heads {kv} and heads {self.heads}")
        even = self.positions != "rotary" or self.head_dim % 2 == 0
        require(even, f"rotary positions need an even head dim, got {self.head_dim}")
        require(self.relative_window >= 1, f"relative_window must be at least 1, got {self.relative_window}")
        require(self.rotary_base > 1, f"rotary_base must be greater than 1, got {self.rotary_base}")

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
    """What every memory system is built from."""

    depth: int = 0
    """Number of layers below this one; a few systems differ from layer to layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "depth")


@documented
@dataclass(frozen=True)
class StateSize:
    """The numbers from which the size of one row's state in one layer follows."""

    shape: LayerShape
    settings: Any
    element: int = 4
    """Bytes of a number."""

    @property
    def head(self) -> int:
        """Bytes of a key and a value of one head."""
        return 2 * self.shape.head_dim * self.element

    @property
    def pair(self) -> int:
        """Bytes of a key and a value of all key/value heads."""
        return self.shape.num_kv_heads * self.head


@documented
@dataclass(frozen=True)
class Budget:
    """How a system is held to a number of memories."""

    knob: str
    """Which setting decides it, in words."""
    settings: Callable[[Recipe, Any], Any] | None = None
    """The system's settings for so many memories; None where nothing can be set."""


@documented
@dataclass(frozen=True)
class Recipe:
    """What a budget may depend on: the recipe's number of layers and the spans that it allows."""

    layers: int
    max_span: int
    ramp: int
    initial_span: float
    settings: Any
    """The recipe's own settings of learned expiry, or the defaults."""


@documented
@dataclass(frozen=True)
class MemorySystem:
    """One memory system, in words, numbers and names."""

    settings: type
    """Frozen dataclass with a literal `kind`; the first line of its docstring is the rule."""
    layer: str
    """Where the module is: "package.module:Class". It is imported when a layer is first built."""
    state: str
    """What a row holds in one layer, as a formula."""
    held: Callable[[StateSize, int], int]
    """The same in bytes, after so many steps; an upper bound where spans are learned."""
    cost: str
    """Work for a sequence of T tokens."""
    budget: Budget
    """How a number of memories is set, for comparisons."""
    streaming: str = "exact"
    """Whether feeding a sequence in any pieces gives the outputs of feeding it whole."""
    training: str = "nothing"
    """What training sees and streaming does not."""
    bounded: bool = True
    """Whether the state stops growing."""
    receptive_field: Callable[[StateSize], int | None] = lambda size: None
    """The most steps back from which one layer reads; None where there is no limit."""
    scores_pairs: bool = True
    """Whether there is a score for each pair of tokens, to which learned relative positions can be added."""
    learns_spans: bool = False
    """Whether training decides how long to remember, so that a budget presses on it."""
    operator: bool = False
    """Whether it runs on the expiring-attention operator."""
    example: dict[str, Any] = field(default_factory=dict)
    """Settings so small that the system forgets, compresses or routes within sixty tokens: for the shared tests."""
    reach: InitVar[Callable[[StateSize], int | None] | None] = None
    """The former name of `receptive_field`; it goes with 0.3.0."""

    def __post_init__(self, reach: Callable[[StateSize], int | None] | None) -> None:
        if reach is not None:
            object.__setattr__(self, "receptive_field", reach)

    @property
    def kind(self) -> str:
        return self.settings.kind  # type: ignore[attr-defined]

    @property
    def rule(self) -> str:
        """What is remembered, in one line."""
        return (self.settings.__doc__ or "").strip().splitlines()[0]
