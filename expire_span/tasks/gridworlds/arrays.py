"""numpy or torch behind the few functions that the engines need, and hashed draws that agree bit for bit between them.

Draws are 64-bit integers that wrap around on overflow; both libraries compute them exactly, on the CPU and on a GPU.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Backend = Literal["numpy", "torch"]
Kind = Literal["bool", "uint8", "int32", "int64", "float32"]
"""Names that numpy and torch share for the types of numbers."""
Array = Any
"""A numpy array or a torch tensor. The engines use only what both offer with the same meaning."""


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
            array = np.asarray(values)
            if array.dtype.kind not in "iub":
                raise ValueError(f"actions and seeds must be integers, got numbers of type {array.dtype}")
            return array.astype(np.int64)
        import torch

        tensor = torch.as_tensor(values, device=self.device)
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"actions and seeds must be integers, got numbers of type {tensor.dtype}")
        return tensor.to(torch.int64)

    def zeros(self, *shape: int, kind: Kind = "int64") -> Array:
        if self.is_numpy:
            return np.zeros(shape, kind)
        import torch

        return torch.zeros(shape, dtype=getattr(torch, kind), device=self.device)

    def falses(self, *shape: int) -> Array:
        return self.zeros(*shape, kind="bool")

    def arange(self, count: int) -> Array:
        if self.is_numpy:
            return np.arange(count)
        import torch

        return torch.arange(count, device=self.device)

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

    def join(self, left: Array, right: Array) -> Array:
        """Two arrays one behind the other along the last axis."""
        if self.is_numpy:
            return np.concatenate([left, right], -1)
        import torch

        return torch.cat([left, right], -1)

    def cast(self, array: Array, kind: Kind) -> Array:
        if self.is_numpy:
            return array.astype(kind)
        import torch

        return array.to(getattr(torch, kind))

    def clamp(self, array: Array, last: Array | int) -> Array:
        """Numbers clamped to [0, last]."""
        if self.is_numpy:
            return np.minimum(np.maximum(array, 0), last)
        return array.clamp(min=0).clamp(max=last)

    def positions(self, rows: Array) -> Array | None:
        """Numbers of the rows that are True; None on a GPU, where counting them would wait for the device."""
        if self.is_numpy:
            return np.flatnonzero(rows)
        return rows.nonzero()[:, 0] if self.device == "cpu" else None

    def merge(self, old: Array, new: Array, rows: Array, positions: Array | None) -> Array:
        """`old` with some rows replaced. `new` has the rows at `positions`, or all rows where `positions` is None.

        The result is a new array, since callers may still hold the old one.
        """
        if positions is None:
            return self.where(rows.reshape((-1,) + (1,) * (len(old.shape) - 1)), new, old)
        if len(positions) == len(old):
            return new
        out = old.copy() if self.is_numpy else old.clone()
        out[positions] = new
        return out

    def bytes_of(self, array: Array) -> Array:
        """The four bytes of each number below 2**31, lowest first, along a new last axis."""
        if self.is_numpy:
            return np.ascontiguousarray(array, "<i4").view(np.uint8).reshape(*array.shape, 4)
        import torch

        return array.to(torch.int32).contiguous().view(torch.uint8).reshape(*array.shape, 4)

    def to_numpy(self, array: Array) -> np.ndarray:
        return array if self.is_numpy else array.cpu().numpy()


def below(draws: Array, limit: Array | int) -> Array:
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
    place = (draws * 0 + 1).cumsum(1)
    mine, other = draws[:, :, None], draws[:, None, :]
    first = (other < mine) | ((other == mine) & (place[:, None, :] < place[:, :, None]))
    return first.sum(-1)
