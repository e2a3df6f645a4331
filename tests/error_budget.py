"""Tolerances from an error budget: a result may be as far from float64 as the definition is when computed with fewer digits.

The budget is measured where the test runs, from a second computation of the same result, so that it holds on any CPU: another
order of summation changes both in the same way. For two computations that differ only in the order of their sums, `reordered`
gives the budget from the number of terms.
"""

import torch
from torch import Tensor

FACTOR = 4.0
"""How many times larger than the measured rounding error an error may be. Two computations of the same sum in different
orders have errors of the same size but not the same errors; norms over many values differ by far less than this."""


def reordered(terms: int, *, depth: int = 1, size: float = 1.0, dtype: torch.dtype = torch.float32) -> float:
    """How far two results may lie apart that come from the same operations with sums in different orders.

    Rounding errors are independent of each other and add like the steps of a random walk: a sum of `terms` numbers errs by
    about sqrt(terms) units in the last digit of its largest partial sum, of about `size`; `depth` such sums one after another
    by sqrt(depth) as much; and the difference of two computations by sqrt(2). FACTOR is the room for the largest of many.
    """
    return FACTOR * _eps(dtype) * size * (2 * terms * depth) ** 0.5


def budget(got: Tensor, exact: Tensor, rounded: Tensor, factor: float = FACTOR, terms: Tensor | None = None) -> float:
    """The largest allowed norm of `got - exact`.

    Args:
        exact: the result from float64 arithmetic.
        rounded: the same result from the definition in fewer digits: those of `got`, or of float32 where `got` is float64.
            Rounding errors are proportional to the distance between neighbouring numbers, so float32's are scaled down.
        terms: for each result, the sum of the sizes of the terms that it is the sum of, where they may be larger than 1. Terms
            that cancel leave a unit in the last digit of theirs, or by luck nothing, as in the measured computation.
    """
    exact = exact.detach()
    measured = float((rounded.detach().double() - exact).norm()) * _eps(got.dtype) / _eps(rounded.dtype)
    # A result is rounded once to its own dtype, whatever was computed before. And terms of size 1 may cancel, as in the score
    # gradient of a query that sees a single memory: one computation then gives exactly 0 and another one unit in the last
    # digit of its accumulator.
    least = _eps(got.dtype) * float(exact.norm())
    least += _eps(torch.promote_types(got.dtype, torch.float32)) * exact.numel() ** 0.5
    if terms is not None:
        least += _eps(torch.promote_types(got.dtype, torch.float32)) * float(terms.norm())
    return factor * (measured + least)


def assert_within_budget(
    got: Tensor,
    exact: Tensor,
    rounded: Tensor,
    factor: float = FACTOR,
    name: str = "y",
    terms: Tensor | None = None,
) -> None:
    exact = exact.detach()
    error, allowed = float((got.detach().double() - exact).norm()), budget(got, exact, rounded, factor, terms)
    size = float(exact.norm())
    assert error <= allowed, f"{name}: error {error:.3g}, budget {allowed:.3g}, size {size:.3g}"  # fails for NaN too


def assert_all_within_budget(
    got: dict[str, Tensor],
    exact: dict[str, Tensor],
    rounded: dict[str, Tensor],
    factor: float = FACTOR,
    terms: dict[str, Tensor] | None = None,
) -> None:
    assert got.keys() == exact.keys() == rounded.keys()
    for name, want in exact.items():
        assert_within_budget(got[name], want, rounded[name], factor, name, (terms or {}).get(name))


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


DOUBLE = reordered(4096, depth=64, size=16.0, dtype=torch.float64)
"""1e-11, for results in float64 of the models that tests build: no sum in them has more than 4,096 terms, no result comes from
more than 64 sums one after another or is larger than 16. A memory that is lost or kept too long changes far more than that."""
