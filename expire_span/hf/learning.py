"""The cache layer for learning: it keeps hidden states, so that spans of earlier blocks' memories still get gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.ops.rule import is_alive
from expire_span.store import ExpiringMemory

from .attention import LayerReading, is_kept
from .cache import ExpiringLayer, StatesBeside


class LearningLayer(ExpiringLayer):
    """Its store has a row for each batch row, in which a memory lives while any head needs it. Spans are predicted again in
    every block from the stored hidden states.

    Keys and values come from the frozen model and have no gradient; the predictor's weights get gradients from all living
    memories, old and new.
    """

    last: LayerReading | None = None
    """The `LayerReading` of the last forward pass, whose spans have gradients: for the span loss and the count of living
    memories."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.memory = ExpiringMemory.empty(len(key_states), ramp=self.ramp, device=key_states.device)

    def reset(self) -> None:
        super().reset()
        self.last = None

    def _remember(self, reading: LayerReading, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        assert reading.hidden is not None and reading.predictor is not None
        old = self._kept()
        count = keys.shape[2]
        pos = torch.arange(self.seen, self.seen + count, device=keys.device)
        fields: dict[str, Any] = dict(k=keys.transpose(1, 2), v=values.transpose(1, 2), h=reading.hidden)
        if len(old):
            stored = {name: old[name] for name in fields}
            reading.span = torch.cat([self._predict_again(reading, stored["h"], old), reading.span], -1)
            keys = torch.cat([stored["k"].transpose(1, 2), keys], 2)
            values = torch.cat([stored["v"].transpose(1, 2), values], 2)
        k_pos = torch.cat([old.pos, pos.expand(len(keys), -1)], -1)
        reading.k_pos, self.last = k_pos, reading
        longest = reading.span.detach().amax(1)
        self.memory = old.append(pos, longest[:, -count:], check_values=False, **fields)
        if len(old):
            self.memory = self.memory.with_span(longest)
        return keys, values

    def _predict_again(self, reading: LayerReading, hidden: Tensor, old: ExpiringMemory) -> Tensor:
        assert reading.predictor is not None
        # A copy, since new memories are written into the same buffer before the backward pass.
        span = reading.predictor(hidden.clone())
        marked = ~is_alive(old.span, self.ramp) | is_kept(old.span)  # padding stays dead, and what is kept stays
        return torch.where(marked.unsqueeze(1), old.span.unsqueeze(1), span)


class HybridLearningLayer(StatesBeside, LearningLayer):
    """The layer for learning of a hybrid, with recurrent states beside its memories."""

    memories = LearningLayer
