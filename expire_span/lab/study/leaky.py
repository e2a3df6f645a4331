"""The leaky counter: h = tanh(w1 h' + w2 g), where g is the detector's "inside".

There is a trade-off: a large w1 keeps what was counted, a large w2 makes an entrance visible. The counter also adds on every
step inside, not only on entering, since it has no state that says whether it was inside before.
"""

from __future__ import annotations

import numpy as np

from .tanh_stack import INSIDE

RATIOS = np.geomspace(1 / 8, 32, 33)
"""Ratios w1 / w2 of the sweep; the two weights add up to 1."""
REST = 10
"""Number of steps outside the interval after which retention is measured."""


def weights_of(ratio: float) -> tuple[float, float]:
    return ratio / (1 + ratio), 1 / (1 + ratio)


def run_leaky(inside: np.ndarray, w1: float, w2: float, h: float = 0.0) -> np.ndarray:
    """The state after each step, [T], for a series of detector outputs [T]."""
    out = []
    for g in inside.tolist():
        h = float(np.tanh(w1 * h + w2 * g))
        out.append(h)
    return np.array(out)


def measure_leak(ratio: float, rest: int = REST) -> tuple[float, float]:
    """(increment, retention): what one step inside adds to an empty counter, and the share of it that is left `rest` steps
    later."""
    trace = run_leaky(np.array([INSIDE] + [0.0] * rest), *weights_of(ratio))
    return float(trace[0]), float(trace[-1] / trace[0])


def sweep(ratios: np.ndarray = RATIOS) -> np.ndarray:
    """Increment and retention for every ratio, [ratios, 2]."""
    return np.array([measure_leak(float(ratio)) for ratio in ratios])
