"""The hard-coded counter of entrances: two numbers of state, exact on series of any length.

inside = [0 <= x <= 1],   n = n' + [not inside' and inside]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class State:
    """The counter's state."""

    inside: int = 0
    """1 if the last value was in [0, 1], else 0."""
    count: int = 0
    """Number of entrances so far."""


def step(x: float, state: State) -> State:
    inside = int(0 <= x <= 1)
    return State(inside, state.count + int(inside and not state.inside))


def run_counter(values: np.ndarray) -> np.ndarray:
    """Feed a series [T] value by value; returns the state after each, rows `inside` and `count`, [2, T]."""
    state, rows = State(), []
    for x in values.tolist():
        state = step(x, state)
        rows.append((state.inside, state.count))
    return np.array(rows, np.int64).reshape(-1, 2).T
