"""The hash behind every draw of the tasks, splitmix64: a draw can be made alone, in any order, with equal bits everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np

_WEYL, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """Hash unsigned 64-bit integers elementwise: a Weyl step and the finaliser of splitmix64, wrapping around on overflow."""
    z = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(_WEYL)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def mix_signed(z: Any) -> Any:
    """The same bits for signed integers, in a numpy array or a torch tensor (torch has no unsigned arithmetic).

    Signed integers are shifted arithmetically; masks make the shifts logical, which costs a sixth more time.
    """
    z = z + (_WEYL - 2**64)
    z = (z ^ ((z >> 30) & (2**34 - 1))) * (_FIRST - 2**64)
    z = (z ^ ((z >> 27) & (2**37 - 1))) * (_SECOND - 2**64)
    return z ^ ((z >> 31) & (2**33 - 1))


def draws_of(key: np.ndarray, numbers: np.ndarray | int, places: np.ndarray | int) -> np.ndarray:
    """One draw for each place of each numbered series, under a key; numbers and places broadcast against each other."""
    return mix(mix(key + np.asarray(numbers).astype(np.uint64)) + np.asarray(places).astype(np.uint64))
