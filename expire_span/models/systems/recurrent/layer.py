"""Recurrent memories: torch's own tanh RNN, GRU and LSTM as mixers. The state is one vector per row (two for the LSTM).

tanh:  h = tanh(W x + b + U h' + b')
GRU:   h = z h' + (1 - z) c,  c = tanh(W x + b + r (U h' + b'))
LSTM:  s = f s' + i g,  h = o tanh(s)
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from expire_span.models.kit.attention import empty_rows
from expire_span.models.mixer import Keep, Mixer, MixerAux, MixerOutput
from expire_span.models.state import bytes_of
from expire_span.models.systems.recurrent import LSTMConfig, TanhRNNConfig, TorchGRUConfig


class Recurrent(Mixer):
    """State {"h": [B, hidden]} and whatever else `parts` names."""

    parts: ClassVar[tuple[str, ...]] = ("h",)
    fixed_state = True
    cell: ClassVar[Any] = None

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        self.hidden: int = self.settings.hidden or self.shape.dim
        self.rnn = self.build_cell(self.shape.dim)
        self.out = nn.Linear(self.hidden, self.shape.dim, bias=False)

    def build_cell(self, dim: int) -> nn.Module:
        return self.cell(dim, self.hidden, batch_first=True)

    def initial_state(self, batch: int, keep: Keep = "kv", *, empty: Tensor | None = None) -> dict[str, Tensor]:
        return {name: self.out.weight.detach().new_zeros(batch, self.hidden) for name in self.parts}

    def reset_rows(self, state: dict[str, Tensor], fresh: Tensor, *, empty: Tensor | None = None) -> dict[str, Tensor]:
        return empty_rows(state, fresh, self.initial_state(len(fresh)))

    def run(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, T, C] -> hidden states [B, T, hidden] and the state after the last."""
        given = [state[name].unsqueeze(0).contiguous() for name in self.parts]
        y, after = self.rnn(x, tuple(given) if len(given) > 1 else given[0])
        after = after if isinstance(after, tuple) else (after,)
        return y, {name: part.squeeze(0) for name, part in zip(self.parts, after)}

    def mix(self, x: Tensor, state: dict[str, Tensor]) -> MixerOutput:
        with torch.autocast(x.device.type, enabled=False):
            y, after = self.run(x.to(self.out.weight.dtype), state)
        after = {name: part.detach().clone() for name, part in after.items()}
        aux = MixerAux(live=torch.ones((), device=x.device), bytes_held=bytes_of(after))
        return MixerOutput(self.out(y), after, aux)


class TanhRNN(Recurrent):
    settings_class = TanhRNNConfig
    cell = nn.RNN


class TorchGRU(Recurrent):
    settings_class = TorchGRUConfig
    cell = nn.GRU


class LSTM(Recurrent):
    settings_class = LSTMConfig
    parts = ("h", "c")
    cell = nn.LSTM
