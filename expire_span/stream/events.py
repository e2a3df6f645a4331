"""Which memories were written and which died in a step, read from the slots. The host waits for the device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expire_span.store.slots import FRESH, Slots

from .engines import Engine, SteadyEngine
from .tokens import Events

Living = set[tuple[int, int, int]]
"""Memories, each as (row, head, position at which it was written)."""


def remember_living(engine: Engine) -> list[Living]:
    """Which memories are alive for the next step, in every layer that keeps slots."""
    if not isinstance(engine, SteadyEngine):
        return []
    clock = engine.clock
    return [_living(layer.slots, clock.column, engine.position) for layer in engine.stepper.slot_layers]


def find_events(engine: Engine, before: list[Living]) -> list[Events]:
    """The births and deaths of the step that was just taken, given the memories that were alive before it, for each layer."""
    if not isinstance(engine, SteadyEngine):
        return []
    found = []
    for layer, living in zip(engine.stepper.slot_layers, before):
        slots, column, born_at = layer.slots, engine.clock.column, engine.position - 1
        rows, heads = slots.counts.shape
        candidates = living | {(row, head, born_at) for row in range(rows) for head in range(heads)}
        died = sorted(candidates - _living(slots, column, engine.position))
        found.append(Events(_newest_spans(slots, column - 1), died))
    return found


def _living(slots: Slots, column: int, position: int) -> Living:
    alive = (slots.left(column) > 0).nonzero()
    pos: Any = slots.by_head(slots.pos)[tuple(alive.unbind(1))].long() + (position - column)
    return {(row, head, born) for (row, head, _), born in zip(alive.tolist(), pos.tolist())}


def _newest_spans(slots: Slots, column: int) -> Tensor:
    assert 0 <= column < FRESH
    return (slots.by_head(slots.edge)[:, :, column] - slots.ramp).cpu()
