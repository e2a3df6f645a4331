"""The rule by which memories fade and die. Everything that is not the definition (reference.py) asks it; triton/rule.py is its
counterpart for kernels.

A memory with span e that is a steps old remains at full weight for r = e - a more steps, is on its ramp while -ramp < r < 0,
and is dead once r <= -ramp. Spans and ages are compared in float32 (float64 where spans are float64), whatever the dtype of the
model: positions are subtracted as integers first. The age is subtracted before the ramp is added, since a sum of span and ramp
would lose a short ramp beside a long span. An empty slot has position `NEVER` and is dead for every query.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

NEVER = -(2**40)
"""Position of an empty slot: a memory born so long ago that it is dead for every query."""
FOREVER = 2.0**60
"""A lifetime beyond all differences of positions. Longer ones are cut to it, so that no sum with a position overflows."""
COSINE = False
"""Whether the ramp is half a cosine instead of a line: only in tests, which so see that every implementation asks this rule."""


def exact_span(span: Tensor) -> Tensor:
    """Spans in the dtype in which they are compared with ages: float64 stays, everything else becomes float32."""
    return span if span.dtype == torch.float64 else span.float()


def is_alive(remaining: Tensor, ramp: float) -> Tensor:
    """Whether memories with so many steps `remaining` (span - age) can be read."""
    return remaining > -ramp


def until_dead(remaining: Any, ramp: float) -> Any:
    """Steps until memories with so many steps `remaining` are dead; dead where <= 0. At birth: lifetimes of spans."""
    return remaining + ramp


def full_until(dies: Any, ramp: float) -> Any:
    """The inverse: until when a memory that is dead at `dies` has its full weight; of the age at which it dies, its span."""
    return dies - ramp


def steps_left(span: Tensor, pos: Tensor, now: int, ramp: float) -> Tensor:
    """Steps until each memory is dead, counted from a query at `now`; dead where <= 0. span, pos [.., S] -> [.., S]."""
    span = exact_span(span)
    left = until_dead(span - (now - pos).to(span.dtype), ramp)
    return left.masked_fill(pos == NEVER, -torch.inf)


def lifetime(span: Tensor, ramp: float) -> Tensor:
    """The youngest age at which a memory is dead: its number of steps, as int64, not below 0."""
    span = exact_span(span.detach())
    last = whole_steps(torch.ceil(span + ramp)) - 1  # one step off where this sum is rounded over a whole number
    life = last + is_alive(span - last.to(span.dtype), ramp) + is_alive(span - (last + 1).to(span.dtype), ramp)
    return life.clamp_min_(0)


def whole_steps(steps: Tensor) -> Tensor:
    """Whole numbers of steps as int64; infinite ones are long enough to be never reached."""
    return steps.clamp_max(FOREVER).long()


def fade(remaining: Tensor, ramp: float) -> Tensor:
    """The weight of memories with so many steps `remaining`, from 0 (dead) to 1; without a gradient for spans, see `slope`."""
    linear = (remaining / ramp).add_(1).clamp_(0, 1)
    if remaining.device.type != "cpu":  # a GPU multiplies by 1 / ramp, which may leave the dead slightly above 0
        linear = linear.masked_fill_(remaining <= -ramp, 0)
    return linear.mul_(math.pi / 2).sin_().square_() if COSINE else linear


def slope(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of span / ramp from that of the weight: zero where a memory is not on its ramp."""
    on_ramp = is_on_ramp(weight)
    if COSINE:
        gradient = gradient * (weight * (1 - weight)).clamp_min(0).sqrt() * math.pi
    return torch.where(on_ramp, gradient, 0)


def is_on_ramp(weight: Tensor) -> Tensor:
    """Where the weight changes with the span."""
    return (weight > 0) & (weight < 1)
