"""The hard-coded counter of entrances: two numbers of state, exact for ever.

inside = [0 <= x <= 1],   n = n' + [not inside' and inside]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class State:
    """What the counter remembers."""

    inside: int = 0
    """1 where the last value lay in [0, 1]."""
    count: int = 0
    """Maximal runs inside that have begun so far."""


def step(x: float, state: State) -> State:
    inside = int(0 <= x <= 1)
    return State(inside, state.count + int(inside and not state.inside))


def run_counter(values: np.ndarray) -> np.ndarray:
    """Feed a series [T] value by value; the two rows of state after each, [2, T]."""
    state, rows = State(), []
    for x in values.tolist():
        state = step(x, state)
        rows.append((state.inside, state.count))
    return np.array(rows, np.int64).reshape(-1, 2).T
