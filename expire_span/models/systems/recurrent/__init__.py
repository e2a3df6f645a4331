"""Recurrent memories: one family of four systems, since they share their state and their settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from expire_span.checks import Count, checked
from expire_span.models.systems.contract import Budget, MemorySystem, StateSize


@dataclass(frozen=True)
@checked
class _RecurrentConfig:
    hidden: Count | None = None
    """Size of the recurrent state; None takes the model's dim."""


@dataclass(frozen=True)
@checked
class TanhRNNConfig(_RecurrentConfig):
    """One vector, overwritten every step: h = tanh(W x + U h' + b)."""

    kind: Literal["tanh_rnn"] = "tanh_rnn"


@dataclass(frozen=True)
@checked
class GRUConfig(_RecurrentConfig):
    """One gated vector: h = (1 - z) h' + z c with c = tanh(W x + U (r h') + b)."""

    kind: Literal["gru"] = "gru"


@dataclass(frozen=True)
@checked
class TorchGRUConfig(_RecurrentConfig):
    """One gated vector as torch.nn.GRU has it: h = z h' + (1 - z) c with c = tanh(W x + b + r (U h' + b'))."""

    kind: Literal["gru_torch"] = "gru_torch"


@dataclass(frozen=True)
@checked
class LSTMConfig(_RecurrentConfig):
    """Two vectors: a cell that gates keep or overwrite, and what an output gate shows of it."""

    kind: Literal["lstm"] = "lstm"


def _declare(settings: type, layer: str, vectors: int, example: dict[str, Any] | None = None) -> MemorySystem:
    def held(s: StateSize, n: int) -> int:
        return vectors * (s.settings.hidden or s.shape.dim) * s.element

    return MemorySystem(
        settings,
        f"expire_span.models.systems.recurrent.{layer}",
        state="hidden x e" if vectors == 1 else f"{vectors} x hidden x e",
        held=held,
        cost="O(T hidden^2), step after step",
        budget=Budget("none: hidden is matched to the number of parameters"),
        scores_pairs=False,
        example=example or {},
    )


SYSTEMS = (
    _declare(TanhRNNConfig, "layer:TanhRNN", 1),
    _declare(GRUConfig, "gated:GRU", 1, {"hidden": 24}),
    _declare(TorchGRUConfig, "layer:TorchGRU", 1),
    _declare(LSTMConfig, "layer:LSTM", 2),
)
