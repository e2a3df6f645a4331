"""What a gate does to a memory, and entrance counting with the post's gated unit and weights made by hand.

The counter has five units in three layers. Layer one: above 0? below 1? Layer two: inside? (all three with their gates wide
open). Layer three: "inside" again, which at the next step is "was inside"; and the count, whose gate opens a little where
inside - was inside is large, and is shut otherwise. Each opening covers the share `STEP` of the way to 1, so that
h = 1 - (1 - STEP)^n, from which n can be read.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from expire_span.models.systems.recurrent.gated import GatedCell

from .sensitivity import held_cell

OPEN = 1e4
"""Bias that opens a gate: its sigmoid is exactly one."""
STEP = 0.05
"""Share of the way to 1 that the count goes at each entrance."""
UNITS = (2, 1, 2)
"""Units of the three layers of the hand-made counter."""
SHARP = 400.0
"""Slope of the hand-made gate."""


def run_gated_unit(values: Tensor, writes: Tensor, gate: float = 0.0) -> Tensor:
    """One gated unit over values [T]: it takes a value where `writes` [T] is 1 and holds it elsewhere. Its states, [T]."""
    states, _ = held_cell(gate, 1)(torch.stack([values, writes], -1)[None], values.new_zeros(1, 1))
    return states[0, :, 0]


def build_counter(steep: float = 200.0) -> list[GatedCell]:
    """The hand-made counter as three layers of the post's unit."""
    sizes = zip((1, *UNITS), UNITS)
    edges, inside, count = cells = [GatedCell(dim, hidden).double() for dim, hidden in sizes]
    with torch.no_grad():
        for cell in cells:
            for weight in cell.parameters():
                weight.zero_()
        _set_memoryless(edges, [[steep], [-steep]], [0.0, steep])
        _set_memoryless(inside, [[1.0, 1.0]], [0.0])
        count.input.bias[0] = OPEN  # unit 0 follows "inside"
        count.input.weight[4, 0] = 1.0
        largest = math.log(STEP / (1 - STEP))  # the gate of unit 1 never opens further than STEP
        edge = math.tanh(math.tanh(2.0))
        count.input.weight[1, 0] = SHARP  # reads inside - was inside
        count.gates.weight[1, 0] = -SHARP * math.tanh(2.0) / edge
        count.input.bias[1] = largest - SHARP * math.tanh(2.0)
        count.input.bias[5] = 30.0  # its candidate is 1
    return cells


def _set_memoryless(cell: GatedCell, weights: list[list[float]], biases: list[float]) -> None:
    """Gates wide open: the state is tanh(W x + b), whatever it was before."""
    units = len(biases)
    cell.input.bias[:units] = OPEN
    cell.input.weight[2 * units :] = torch.tensor(weights, dtype=torch.float64)
    cell.input.bias[2 * units :] = torch.tensor(biases, dtype=torch.float64)


@torch.no_grad()
def run_counter(values: np.ndarray) -> list[np.ndarray]:
    """Every layer's states over series [B, T]: [B, T, 2], [B, T, 1], [B, T, 2]."""
    x, layers = torch.from_numpy(values)[..., None], []
    for cell in build_counter():
        x, _ = cell(x, x.new_zeros(len(x), cell.candidate.in_features))
        layers.append(x.numpy())
    return layers


def read_count(layers: list[np.ndarray]) -> np.ndarray:
    """The counts that the last layer's second unit stands for, [B, T]."""
    return np.rint(np.log1p(-layers[-1][..., 1]) / math.log1p(-STEP)).astype(np.int64)
