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


def tanh_states(x: Tensor, radius: float = 0.9, seed: int = 0) -> Tensor:
    """h = tanh(x / 2 + U h') over x [T], with U a rotation shrunk by `radius`; all states, [T, units]."""
    turn = torch.randn(UNITS, UNITS, dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    u, h, states = radius * torch.linalg.qr(turn).Q, x.new_zeros(UNITS), []
    for value in x:
        h = torch.tanh(0.5 * value + u @ h)
        states.append(h)
    return torch.stack(states)


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


def gated_states(gate: float) -> Callable[[Tensor], Tensor]:
    """A function from x [T] to states [T, units]: the first value is written, later ones enter by the share `gate`."""
    cell = held_cell(gate)

    def run(x: Tensor) -> Tensor:
        write = torch.zeros_like(x)
        write[0] = 1
        return cell(torch.stack([x, write], -1)[None], x.new_zeros(1, UNITS))[0][0]

    return run


def sensitivity(run: Callable[[Tensor], Tensor], length: int, seed: int = 0) -> np.ndarray:
    """|dh_T / dx_1| for T = 1 .. length: the norm, over the units, of the derivative by the first value."""
    draw = torch.Generator().manual_seed(seed)
    x = (0.5 * torch.randn(length, dtype=torch.float64, generator=draw)).requires_grad_()
    states = run(x)
    # The gradient of (weights * states).sum() by x_1 is linear in the weights, so its derivative by the weights holds the
    # derivatives of all states by x_1.
    weights = torch.zeros_like(states, requires_grad=True)
    (grad,) = torch.autograd.grad(states, x, weights, create_graph=True)
    (slope,) = torch.autograd.grad(grad[0], weights)
    return torch.linalg.vector_norm(slope, dim=-1).numpy()


def half_life(values: np.ndarray) -> float:
    """Number of steps in which a geometric decay halves, from the slope of its logarithm; infinite where nothing is lost."""
    slope = np.polyfit(np.arange(len(values)), np.log(values), 1)[0]
    return math.log(0.5) / slope if slope < -1e-9 else math.inf
