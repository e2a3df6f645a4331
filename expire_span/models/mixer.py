"""The contract of a memory system: `mixer(x, state) -> MixerOutput(y, state, aux)`, state in and state out.

x is [B, T, C] with any T: long T is parallel training, T = 1 is decoding. A state is a nested structure of dicts, lists,
tensors with the batch in dimension 0, plain numbers and `ExpiringMemory`; `state.py` detaches, moves, saves, forks and
reorders it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from expire_span.config import DecoderConfig


@dataclass
class MixerAux:
    """What a mixer reports beside its output; tensors stay on their device."""

    loss: Tensor | None = None
    """Span loss of this block for each row, [B]; unweighted, with gradient."""
    span: Tensor | None = None
    """Spans given to this block's tokens, [B, T] or [B, Hkv, T], detached."""
    live: Tensor | None = None
    """Mean number of memories alive per query of this block (scalar)."""
    bytes_held: int = 0
    """Bytes of memory that the state really occupies after this block."""


@dataclass
class MixerOutput:
    y: Tensor
    state: Any
    aux: MixerAux


class Mixer(nn.Module):
    """Base of every memory system. Subclasses define all three methods, and end in the projection `out`."""

    out: nn.Linear

    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Any = None) -> Any:
        """A fresh state for `batch` rows. `empty` [C] is what a zero hidden state looks like at this mixer's input.

        `cache="none"` says that no later block will read this one: nothing need be stored.
        """
        raise NotImplementedError(f"{type(self).__name__} must define initial_state")

    def reset_rows(self, state: Any, fresh: Tensor, empty: Tensor | None = None) -> Any:
        """The rows marked in `fresh` [B] (bool) begin again, the others keep their memory."""
        raise NotImplementedError(f"{type(self).__name__} must define reset_rows")

    def forward(self, x: Tensor, state: Any) -> MixerOutput:
        raise NotImplementedError(f"{type(self).__name__} must define forward")


def build_mixer(config: DecoderConfig, layer: int, relative_keys: nn.Parameter | None) -> Mixer:
    """The registry: one line per memory system."""
    kind = config.mixer.kind
    if kind == "expire_span":
        from .expire_span import ExpireSpan

        return ExpireSpan(config, relative_keys)
    raise ValueError(f"unknown mixer {kind!r}, known are: expire_span")
