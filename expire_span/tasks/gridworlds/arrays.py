"""numpy or torch behind the few functions that the engines need, and hashed draws that agree bit for bit between them.

Draws are 64-bit integers that wrap around on overflow; both libraries compute them exactly, on the CPU and on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Backend = Literal["numpy", "torch"]
Array = Any
"""A numpy array or a torch tensor. The engines use only what both offer with the same meaning."""

_WEYL, _FIRST, _SECOND = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Arrays:
    """Array constructors of one backend; integers are int64."""

    def __init__(self, backend: Backend, device: str = "cpu") -> None:
        if backend not in ("numpy", "torch"):
            raise ValueError(f"backend must be numpy or torch, got {backend!r}")
        if backend == "numpy" and device != "cpu":
            raise ValueError(f"the numpy backend runs on the cpu only, got device {device!r}; take backend torch")
        self.backend, self.device = backend, device
        self.is_numpy = backend == "numpy"

    def constant(self, values: Any) -> Array:
        """A numpy array or nested list of integers, as int64 of this backend."""
        array = np.asarray(values, np.int64)
        if self.is_numpy:
            return array
        import torch

        return torch.from_numpy(array.copy()).to(self.device)

    def integers(self, values: Any) -> Array:
        """Actions or seeds of any integer kind, as int64 of this backend."""
        if self.is_numpy:
            return np.asarray(values).astype(np.int64)
        import torch

        return torch.as_tensor(values, device=self.device).to(torch.int64)

    def zeros(self, *shape: int) -> Array:
        return self.constant(np.zeros(shape, np.int64))

    def falses(self, *shape: int) -> Array:
        return self.zeros(*shape) != 0

    def arange(self, count: int) -> Array:
        return self.constant(np.arange(count))

    def where(self, condition: Array, left: Any, right: Any) -> Array:
        if self.is_numpy:
            return np.where(condition, left, right)
        import torch

        return torch.where(condition, left, right)

    def stack(self, parts: list[Array]) -> Array:
        """Join arrays of one shape along a new last axis."""
        if self.is_numpy:
            return np.stack(parts, -1)
        import torch

        return torch.stack(parts, -1)

    def cast(self, array: Array, kind: Literal["uint8", "int32", "int64", "float32"]) -> Array:
        if self.is_numpy:
            return array.astype(kind)
        import torch

        return array.to(getattr(torch, kind))

    def bytes_of(self, array: Array) -> Array:
        """The four bytes of each number below 2**31, lowest first, along a new last axis."""
        if self.is_numpy:
            return np.ascontiguousarray(array, "<i4").view(np.uint8).reshape(*array.shape, 4)
        import torch

        return array.to(torch.int32).contiguous().view(torch.uint8).reshape(*array.shape, 4)

    def to_numpy(self, array: Array) -> np.ndarray:
        return array if self.is_numpy else array.cpu().numpy()


def mix(z: Array) -> Array:
    """Scramble 64-bit integers: a Weyl step and the finaliser of splitmix64. Shifts are made logical by masking."""
    z = z + _WEYL
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _FIRST
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _SECOND
    return z ^ ((z >> 31) & (2**33 - 1))


def below(draws: Array, limit: int) -> Array:
    """Uniform integers in [0, limit) from the upper 31 bits of the draws."""
    return (((draws >> 33) & (2**31 - 1)) * limit) >> 31


def chance(draws: Array, share: float) -> Array:
    """True with probability `share`, from the upper 31 bits of the draws."""
    return ((draws >> 33) & (2**31 - 1)) < int(share * 2**31)


def below_low(draws: Array, limit: int) -> Array:
    """Uniform integers in [0, limit) from the lower 31 bits, independent of what `chance` reads."""
    return ((draws & (2**31 - 1)) * limit) >> 31


def ranks(draws: Array) -> Array:
    """[B, N] -> the rank of each draw within its row, [B, N]: a uniform permutation. Equal draws keep their order."""
    size = draws.shape[1]
    smaller = draws[:, None, :] < draws[:, :, None]
    count = smaller.sum(-1)
    for n in range(1, size):
        count[:, n] += (draws[:, :n] == draws[:, n : n + 1]).sum(-1)
    return count
