"""Which memories were written and which died in a step, read from the slots. The host waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.store.slots import FRESH, Slots

from .engines import Engine, SlotEngine
from .tokens import Events

Living = set[tuple[int, int, int]]
"""Memories, each as (row, head, position at which it was written)."""


def count_by_head(engine: Engine) -> list[Tensor]:
    """Number of living memories, [rows, heads] for each layer, 0 for idle rows; no heads where a layer keeps no slots."""
    if not isinstance(engine, SlotEngine):
        return [torch.empty(engine.rows, 0)] * engine.model.layers
    none, active = torch.empty(engine.rows, 0), torch.tensor(engine.active).unsqueeze(1)
    return [none if x is None else x.live(engine.clock.column).cpu() * active for x in _slots_of(engine)]


def remember_living(engine: Engine) -> list[Living]:
    """Which memories are alive for the next step, for each layer; none where a layer keeps no slots."""
    if not isinstance(engine, SlotEngine):
        return [set() for _ in range(engine.model.layers)]
    column = engine.clock.column
    return [set() if slots is None else _living(slots, column, engine.position) for slots in _slots_of(engine)]


def find_events(engine: Engine, before: list[Living]) -> list[Events]:
    """The births and deaths in the active rows in the step that was just taken, for each layer, given the memories
    that were alive before it."""
    nothing = Events(torch.empty(engine.rows, 0), [])
    if not isinstance(engine, SlotEngine):
        return [nothing] * len(before)
    active, column, found = engine.active, engine.clock.column, []
    for slots, living in zip(_slots_of(engine), before):
        if slots is None:
            found.append(nothing)
            continue
        newborn = {(row, head, engine.position - 1) for row in range(slots.rows) for head in range(slots.heads)}
        dead = (living | newborn) - _living(slots, column, engine.position)
        born = _newest_spans(slots, column - 1)
        born[~torch.tensor(active)] = torch.nan
        found.append(Events(born, sorted(memory for memory in dead if active[memory[0]])))
    return found


def _slots_of(engine: SlotEngine) -> list[Slots | None]:
    return [None if layer.memory is None else layer.memory.slots for layer in engine.stepper.layers]


def _living(slots: Slots, column: int, position: int) -> Living:
    alive = (slots.left(column) > 0).nonzero()
    pos: Any = slots.by_head(slots.pos)[tuple(alive.unbind(1))].long() + (position - column)
    return {(row, head, born) for (row, head, _), born in zip(alive.tolist(), pos.tolist())}


def _newest_spans(slots: Slots, column: int) -> Tensor:
    assert 0 <= column < FRESH
    return slots.by_head(slots.span)[:, :, column].to(
        "cpu", copy=True
    )  # a copy on the CPU too, where callers mark idle rows
