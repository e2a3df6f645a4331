"""Which memories were written and which died in a step, read from the slots. The host waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.models.slot_step import SlotStep
from expire_span.store.slots import FRESH, Slots

from .engines import Engine, SteadyEngine
from .tokens import Events

Living = set[tuple[int, int, int]]
"""Memories, each as (row, head, position at which it was written)."""


def remember_living(engine: Engine) -> list[Living]:
    """Which memories are alive for the next step, for each layer; none where a layer keeps no slots."""
    if not isinstance(engine, SteadyEngine):
        return [set() for _ in engine.decoder.blocks]
    column = engine.clock.column
    layers = [_slots_of(step.memory) for step in engine.stepper.blocks]
    return [set() if slots is None else _living(slots, column, engine.position) for slots in layers]


def find_events(engine: Engine, before: list[Living], active: list[bool]) -> list[Events]:
    """The births and deaths in the rows marked `active` in the step that was just taken, for each layer, given the memories
    that were alive before it."""
    nothing = Events(torch.empty(engine.rows, 0), [])
    if not isinstance(engine, SteadyEngine):
        return [nothing] * len(before)
    column, found = engine.clock.column, []
    for step, living in zip(engine.stepper.blocks, before):
        slots = _slots_of(step.memory)
        if slots is None:
            found.append(nothing)
            continue
        newborn = {(row, head, engine.position - 1) for row in range(slots.rows) for head in range(slots.heads)}
        dead = (living | newborn) - _living(slots, column, engine.position)
        born = _newest_spans(slots, column - 1)
        born[~torch.tensor(active)] = torch.nan
        found.append(Events(born, sorted(memory for memory in dead if active[memory[0]])))
    return found


def _slots_of(memory: Any) -> Slots | None:
    return memory.slots if isinstance(memory, SlotStep) else None


def _living(slots: Slots, column: int, position: int) -> Living:
    alive = (slots.left(column) > 0).nonzero()
    pos: Any = slots.by_head(slots.pos)[tuple(alive.unbind(1))].long() + (position - column)
    return {(row, head, born) for (row, head, _), born in zip(alive.tolist(), pos.tolist())}


def _newest_spans(slots: Slots, column: int) -> Tensor:
    assert 0 <= column < FRESH
    return (slots.by_head(slots.edge)[:, :, column] - slots.ramp).cpu()
