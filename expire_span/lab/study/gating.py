"""What a gate does to a memory, and entrance counting with gated units (docs/recurrent.md) whose weights are set by hand.

The counter has five units in three layers. Layer one detects "above 0" and "below 1", layer two "inside"; the gates of these
three are fully open. Layer three has a copy of "inside", which at the next step means "was inside", and the count, whose gate
opens a little where inside - was inside is large and is closed otherwise. Each opening moves the count by the share `STEP` of
its distance to 1, so that after n entrances h = 1 - (1 - STEP)^n, from which n can be computed.
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
"""Share of its distance to 1 by which the count moves at each entrance."""
UNITS = (2, 1, 2)
"""Units of the three layers of the hand-made counter."""
SHARP = 400.0
"""Slope of the hand-made gate."""


def run_gated_unit(values: Tensor, writes: Tensor, gate: float = 0.0) -> Tensor:
    """States [T] of one gated unit over values [T]: it stores the value where `writes` [T] is 1 and keeps its state elsewhere.

    gate: how far the gate is open where nothing is written.
    """
    states, _ = held_cell(gate, 1)(torch.stack([values, writes], -1)[None], values.new_zeros(1, 1))
    return states[0, :, 0]


def build_counter(steep: float = 200.0) -> list[GatedCell]:
    """The hand-made counter as three layers of gated units."""
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
    """Open all gates fully, so that the state is tanh(W x + b) and does not depend on the state before."""
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
    """The counts [B, T] computed from the state of the last layer's second unit."""
    return np.rint(np.log1p(-layers[-1][..., 1]) / math.log1p(-STEP)).astype(np.int64)
