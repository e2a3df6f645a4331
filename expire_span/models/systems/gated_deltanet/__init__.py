"""The gated delta rule, as in Gated Delta Networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import Count, checked
from expire_span.models.systems.contract import Budget, LayerShape, MemorySystem, StateSize

KEY_DIM = 128
"""Default size of a key, for which the rule's GPU kernels are tuned."""


@dataclass(frozen=True)
@checked
class GatedDeltaNetConfig:
    """One matrix a head: it fades by a learned gate, and what a key held is replaced by its new value."""

    kind: Literal["gated_deltanet"] = "gated_deltanet"
    key_dim: Count | None = None
    """Size of a query and a key of one head; None takes 128, or a quarter of dim where that is smaller."""
    own_heads: Count | None = None
    """Number of heads, each with keys and values of its own; None takes so many that all keys together are 3/4 of dim wide."""
    value_factor: Count = 2
    """Size of a value, as a multiple of key_dim."""
    conv: Count = 4
    """Width in steps of the short causal convolution over queries, keys and values."""
    chunk: Count = 64
    """Tokens that training computes at once; it does not change the result."""
    impl: Literal["auto", "torch", "fla"] = "auto"
    """torch: plain PyTorch; fla: the GPU kernels of the fla package; auto: the kernels where they can run."""


@dataclass(frozen=True)
class DeltaShape:
    """Number of heads of a layer, and the size of a key and a value of each head."""

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
        """Channels of the short convolution: queries, keys and values of all heads."""
        return self.heads * (2 * self.key + self.value)


def _held(s: StateSize, steps: int) -> int:
    """Bytes of the matrices and of the convolution's last inputs."""
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
