"""The contract of a memory system: `mixer(x, state) -> MixerOutput(y, state, aux)`, state in and state out.

x is [B, T, C] with any T: long T is parallel training, T = 1 is decoding. A state is a nested structure of dicts, lists,
tensors with the batch in dimension 0, plain numbers and `ExpiringMemory`; `state.py` detaches, moves, saves, forks and
reorders it.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from expire_span.config import DecoderConfig


class MixerAux:
    """What a mixer reports beside its output; tensors stay on their device.

    `loss` and `live` may be given as functions, called when somebody asks: decoding token by token asks for neither.
    """

    def __init__(
        self,
        loss: Tensor | Callable[[], Tensor | None] | None = None,
        span: Tensor | None = None,
        live: Tensor | Callable[[], Tensor] | None = None,
        bytes_held: int = 0,
    ) -> None:
        self._loss, self._live = loss, live
        self.span = span
        """Spans given to this block's tokens, [B, T] or [B, Hkv, T], detached."""
        self.bytes_held = bytes_held
        """Bytes of memory that the state really occupies after this block."""

    @property
    def loss(self) -> Tensor | None:
        """Span loss of this block for each row, [B]; unweighted, with gradient."""
        self._loss = self._loss() if callable(self._loss) else self._loss
        return self._loss

    @loss.setter
    def loss(self, value: Tensor | None) -> None:
        self._loss = value

    @property
    def live(self) -> Tensor | None:
        """Mean number of memories alive per query of this block (scalar)."""
        self._live = self._live() if callable(self._live) else self._live
        return self._live


@dataclass
class MixerOutput:
    y: Tensor
    state: Any
    aux: MixerAux


class Mixer(nn.Module, ABC):
    """Base of every memory system. Subclasses define the three abstract methods, and end in the projection `out`."""

    out: nn.Linear
    steady_shapes: ClassVar[bool] = False
    """Whether the state that training carries keeps its shapes for many blocks, so that compiling whole blocks pays."""

    @abstractmethod
    def initial_state(self, batch: int, empty: Tensor | None = None, cache: Any = None) -> Any:
        """A fresh state for `batch` rows. `empty` [C] is what a zero hidden state looks like at this mixer's input.

        `cache="none"` says that no later block will read this one: nothing need be stored.
        """

    @abstractmethod
    def reset_rows(self, state: Any, fresh: Tensor, empty: Tensor | None = None) -> Any:
        """The rows marked in `fresh` [B] (bool) begin again, the others keep their memory."""

    def can_record(self, carried: bool) -> bool:
        """Whether a training step never makes the host wait, so that it can be recorded as a CUDA graph and replayed.

        carried: with memory from the block before, or on sequences that stand alone.
        """
        return False

    @abstractmethod
    def forward(self, x: Tensor, state: Any) -> MixerOutput:
        """What to add to x [B, T, C], the state after it, and what was seen on the way."""


MIXERS = {
    "expire_span": ("expire_span", "ExpireSpan"),
    "full": ("full", "Full"),
    "transformer_xl": ("transformer_xl", "TransformerXL"),
    "adaptive_span": ("adaptive_span", "AdaptiveSpan"),
    "compressive": ("compressive", "Compressive"),
    "sliding_window": ("sliding_window", "SlidingWindow"),
    "longformer": ("longformer", "Longformer"),
    "bigbird": ("bigbird", "BigBird"),
    "linear": ("linear", "Linear"),
    "performer": ("performer", "Performer"),
    "routing": ("routing", "Routing"),
    "reformer": ("reformer", "Reformer"),
    "tanh_rnn": ("recurrent", "TanhRNN"),
    "gru": ("gru", "GRU"),
    "gru_torch": ("recurrent", "TorchGRU"),
    "lstm": ("recurrent", "LSTM"),
    "forgetting": ("forgetting", "Forgetting"),
    "streaming_sinks": ("streaming_sinks", "StreamingSinks"),
}
"""The registry: kind -> (file, class); a file is imported when its mixer is first built."""


def build_mixer(config: DecoderConfig, layer: int, relative_keys: nn.Parameter | None) -> Mixer:
    """The mixer that a decoder's config asks for, for one layer."""
    kind = config.mixer.kind
    if kind not in MIXERS:
        raise ValueError(f"unknown mixer {kind!r}, known are: {', '.join(MIXERS)}")
    file, name = MIXERS[kind]
    return getattr(importlib.import_module(f"{__package__}.{file}"), name)(config, layer, relative_keys)
