"""How much the state still depends on the first input, T steps later: |dh_T / dx_1|.

A tanh cell multiplies the derivative by U and by 1 - h^2 at every step, so that it decays geometrically. A gated cell
multiplies it by 1 - z: with a closed gate (z = 0) by one, so that nothing is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from expire_span.models.systems.recurrent.gated import GatedCell

SHUT = -1e4
"""Bias that shuts a gate: its sigmoid is exactly zero."""
UNITS = 8


Step = Callable[[Tensor, Tensor, bool], Tensor]
"""One step of a cell: values [n], states [n, units] before it, whether it is the first -> states after it."""


def tanh_step(radius: float = 0.9, seed: int = 0) -> Step:
    """h = tanh(x / 2 + U h'), with U a rotation shrunk by `radius`."""
    turn = torch.randn(UNITS, UNITS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    u = radius * torch.linalg.qr(turn).Q
    return lambda values, states, first: torch.tanh(0.5 * values.unsqueeze(1) + states @ u.T)


def held_cell(gate: float, units: int = UNITS) -> GatedCell:
    """A gated cell that writes where its second input is 1, and elsewhere replaces the share `gate` of its state each step."""
    closed = math.log(gate / (1 - gate)) if gate > 0 else SHUT
    cell = GatedCell(2, units).double()
    with torch.no_grad():
        for weight in cell.parameters():
            weight.zero_()
        cell.input.weight[:units, 1] = 1e4 - closed
        cell.input.bias[:units] = closed
        cell.input.weight[2 * units :, 0] = 0.5
    return cell


def gated_step(gate: float) -> Step:
    """The first value is written; later ones enter by the share `gate`."""
    cell = held_cell(gate)

    def step(values: Tensor, states: Tensor, first: bool) -> Tensor:
        write = torch.full_like(values, float(first))
        return cell(torch.stack([values, write], -1).unsqueeze(1), states)[1]

    return step


def sensitivity(step: Step, length: int, seed: int = 0) -> np.ndarray:
    """|dh_T / dx_1| for T = 1 .. length: the norm, over the units, of the derivative by the first value."""
    draw = torch.Generator().manual_seed(seed)
    state, slope, found = torch.zeros(UNITS, dtype=torch.float64), torch.zeros(UNITS, dtype=torch.float64), []
    for t, value in enumerate(0.5 * torch.randn(length, dtype=torch.float64, generator=draw)):
        # Row u of the states is asked for unit u only, so that its gradient is that unit's row of the step's derivative.
        values, states = (x.repeat(UNITS, 1).requires_grad_() for x in (value, state))
        after = step(values.squeeze(1), states, t == 0)
        by_value, by_state = torch.autograd.grad(after.diagonal().sum(), (values, states), materialize_grads=True)
        slope = by_value.squeeze(1) if t == 0 else by_state @ slope
        state = after[0].detach()
        found.append(slope)
    return torch.linalg.vector_norm(torch.stack(found), dim=-1).numpy()


def half_life(values: np.ndarray) -> float:
    """Number of steps in which a geometric decay halves, from the slope of its logarithm; infinite where nothing is lost."""
    slope = np.polyfit(np.arange(len(values)), np.log(values), 1)[0]
    return math.log(0.5) / slope if slope < -1e-9 else math.inf
