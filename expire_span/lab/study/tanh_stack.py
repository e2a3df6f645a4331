"""Hand-made tanh units that tell whether a number lies in [0, 1]: two monotone ones, and one that adds them.

    left = tanh(a x),   right = tanh(-a x + a),   inside = tanh(left + right)

`left` detects "above 0" and `right` detects "below 1". The post that docs/recurrent.md follows has a negative bias in `right`;
then the stack responds to [-1, 0] instead, with -0.96, and is about 0 on [0, 1].
"""

from __future__ import annotations

import math

import numpy as np

INSIDE = math.tanh(2.0)
"""Output of the stack well inside the interval: 0.964."""
STEEP = 20.0
"""The default slope a."""


def cell(mixture: np.ndarray) -> np.ndarray:
    """One tanh unit: tanh of a linear mixture of inputs and state."""
    return np.tanh(mixture)


def family(angle: float, scale: float, bias: float, grid: np.ndarray) -> np.ndarray:
    """One member of the two-dimensional family on a grid of (x, h'): tanh(scale (x cos + h' sin) + bias)."""
    x, h = np.meshgrid(grid, grid)
    return cell(scale * (x * math.cos(angle) + h * math.sin(angle)) + bias)


def first_layer(x: np.ndarray, steep: float = STEEP, sign: int = 1) -> np.ndarray:
    """The two detectors, [2, ...]; sign -1 uses the post's negative bias."""
    return np.stack([cell(steep * x), cell(-steep * x + sign * steep)])


def detect(x: np.ndarray, steep: float = STEEP, sign: int = 1) -> np.ndarray:
    """The second layer: about 0.96 inside [0, 1] and about 0 outside."""
    return cell(first_layer(x, steep, sign).sum(0))
