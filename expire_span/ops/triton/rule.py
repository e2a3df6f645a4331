"""The rule of ops/rule.py for kernels, which inline these helpers."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import triton
import triton.language as tl

from expire_span.ops import rule

COSINE = tl.constexpr(rule.COSINE)
QUARTER = tl.constexpr(math.pi / 2)
DOUBLE = tl.constexpr(-2 / math.log(2))
"""e^(-2 x) is 2^(DOUBLE x)."""
SHORT = 2.0**-7
"""Ramps below it are sharp; see `is_sharp`."""
STEEP = tl.constexpr(2.0**40)
"""Factor so large that half a step times it is longer than any ramp; see `find_remaining`."""


@lru_cache
def inverse(ramp: float) -> float:
    """1 / ramp in float32, rounded up: so the weight of a memory with -ramp steps remaining is 0 and no more."""
    exact = np.float32(ramp)
    near = np.float32(1) / exact
    return float(near if float(near) * float(exact) >= 1 else np.nextafter(near, np.float32(np.inf)))


def is_sharp(ramp: float) -> bool:
    """Whether a ramp is so short that a span loses too much of it in a sum with a birth, up to 128 steps in a tile: 2^-18."""
    return ramp < SHORT


@triton.jit
def find_remaining(birth, span, since, MIN_AGE: tl.constexpr, BY_QUERY: tl.constexpr, SHARP: tl.constexpr):
    """Steps that each memory remains at full weight: span - age; far below any -ramp if it is not yet born. All arguments
    broadcast against each other. SHARP: subtract the age from the span at once, which takes one more operation for each pair.

    The condition "already born" enters as a product with STEEP and a minimum. This is cheaper than a second comparison, whose
    results the compiler would have to pack into bits because a GPU has few predicate registers. BY_QUERY: choose the order of
    operations for threads that hold fewer queries than memories.
    """
    if BY_QUERY:
        seen = (since - (MIN_AGE - 0.5)) * STEEP - birth * STEEP
    else:
        seen = since * STEEP - (birth + (MIN_AGE - 0.5)) * STEEP
    remaining = span - (since - birth) if SHARP else (span + birth) - since
    return tl.minimum(remaining, seen)


@triton.jit
def is_alive(remaining, ramp):
    """Whether memories with so many steps `remaining` can be read."""
    return remaining > -ramp


@triton.jit
def lifetime(span, ramp):
    """The youngest whole age at which a memory is dead, as int64; beyond 1e9 steps any large number."""
    last = (
        tl.ceil(tl.minimum(span + ramp, 1.0e9)).to(tl.int64) - 1
    )  # one step off where the sum is rounded over a whole number
    life = last + is_alive(span - last.to(tl.float32), ramp).to(tl.int64)
    return life + is_alive(span - (last + 1).to(tl.float32), ramp).to(tl.int64)


@triton.jit
def fade(remaining, inv_ramp):
    """The weight of memories with so many steps `remaining`, written so that the compiler makes one saturating multiply-add of it.
    inv_ramp: what `inverse` gives."""
    linear = tl.minimum(tl.maximum(remaining * inv_ramp + 1.0, 0.0), 1.0)
    if COSINE:
        linear = tl.sin(linear * QUARTER)
        linear = linear * linear
    return linear


@triton.jit
def slope(gradient, remaining, half):
    """The gradient of span / ramp from that of the weight: zero where a memory is not on its ramp. half: half the ramp."""
    if COSINE:
        gradient *= QUARTER * tl.abs(tl.sin(remaining / half * QUARTER))
    return tl.where(tl.abs(remaining + half) < half, gradient, 0.0)


@triton.jit
def tanh(x):
    """The hyperbolic tangent: by its series near 0, where the quotient of exponentials would lose digits."""
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    e = tl.math.exp2(tl.abs(x) * DOUBLE)
    far = (1 - e) / (1 + e)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))
