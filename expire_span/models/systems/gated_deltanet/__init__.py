"""The gated delta rule, as in Gated Delta Networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import checked
from expire_span.models.systems.contract import Budget, LayerShape, MemorySystem, StateSize, at_least

KEY_DIM = 128
"""Size of a key in models that are wide enough for it: the size that the rule's GPU kernels are made for."""


@dataclass(frozen=True)
@checked
class GatedDeltaNetConfig:
    """One matrix a head: it fades by a learned gate, and what a key held is replaced by its new value."""

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    key_dim: int | None = None
    """Size of a query and a key of one head; None takes 128, or a quarter of dim where that is smaller."""
    own_heads: int | None = None
    """Heads, each with keys and values of its own; None takes as many as make all keys together three quarters of dim."""
    value_factor: int = 2
    """Size of a value, as a multiple of key_dim."""
    conv: int = 4
    """Steps that the short convolution over queries, keys and values looks at, the present one included."""
    chunk: int = 64
    """Tokens that training handles at once; it does not change the result."""
    impl: Literal["auto", "torch", "fla"] = "auto"
    """The kernels of the fla package on a GPU, or plain PyTorch; auto takes the kernels where they can run."""

    def __post_init__(self) -> None:
        at_least(self, 1, "value_factor", "conv", "chunk", "key_dim", "own_heads")


@dataclass(frozen=True)
class DeltaShape:
    """How many heads a layer has, and the sizes of a key and a value of each."""

    heads: int
    key: int
    value: int
    conv: int

    @classmethod
    def of(cls, shape: LayerShape, settings: GatedDeltaNetConfig) -> DeltaShape:
        key = settings.key_dim or min(KEY_DIM, max(shape.dim // 4, 1))
        heads = settings.own_heads or max(1, round(0.75 * shape.dim / key))
        return cls(heads, key, settings.value_factor * key, settings.conv)

    @property
    def channels(self) -> int:
        """Numbers of a step that the short convolution reads: queries, keys and values of all heads."""
        return self.heads * (2 * self.key + self.value)


def _held(s: StateSize, steps: int) -> int:
    """Bytes of the matrices and of the steps that the short convolution still reads."""
    shape = DeltaShape.of(s.shape, s.settings)
    return (shape.heads * shape.key * shape.value + (shape.conv - 1) * shape.channels) * s.element


SYSTEM = MemorySystem(
    GatedDeltaNetConfig,
    "expire_span.models.systems.gated_deltanet.layer:GatedDeltaNet",
    state="H K V e, and the convolution's last inputs",
    held=_held,
    cost="O(T K V)",
    budget=Budget("none: heads and key_dim decide"),
    scores_pairs=False,
    example={"chunk": 16, "key_dim": 8},
)
