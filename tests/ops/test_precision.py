"""Digits beyond half precision, as plain and as compiled code find them."""

import pytest
import torch

from expire_span.models.kit.precision import split_digits
from expire_span.models.systems.forgetting.layer import _key_columns

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def plain(function):
    return function


CASES = [pytest.param(dtype, plain, id=f"plain-{dtype}") for dtype in DTYPES]
CASES += [pytest.param(torch.bfloat16, torch.compile, id="compiled-torch.bfloat16")]
CASES += [pytest.param(dtype, torch.compile, id=f"compiled-{dtype}", marks=pytest.mark.long) for dtype in DTYPES[1:]]
"""A compiler removes rounding to a narrower type and back, unless it is told not to. Compiling a case takes seconds."""


@pytest.mark.parametrize(("dtype", "compiler"), CASES)
def test_parts_add_up(dtype, compiler):
    x = torch.randn(4, 64, dtype=torch.float64 if dtype == torch.float32 else torch.float32)
    cases = ((1, 7), (2, 15), (3, 20))
    for parts, digits in cases if compiler is plain else cases[-1:]:
        found = compiler(split_digits)(x, dtype, parts)
        assert [part.dtype for part in found] == [dtype] * parts
        error = (x.double() - sum(part.double() for part in found)).abs().max()
        assert float(error) < 2.0**-digits * float(x.abs().max())
    assert float(found[1].abs().max()) > 0


@pytest.mark.parametrize(("dtype", "compiler"), CASES)
def test_a_memory_keeps_its_bias_in_a_wider_key(dtype, compiler):
    """To the digits of float32, with its gradient; an empty slot's stays out of sight, but a number."""
    bias = (-20 * torch.rand(2, 3, 50, dtype=torch.float64).cumsum(-1)).requires_grad_()
    wide = compiler(_key_columns)(bias, dtype)
    torch.testing.assert_close(wide[..., :3].double().sum(-1), bias, rtol=2.0**-20, atol=2.0**-22)
    wide[..., 0].double().sum().backward()
    torch.testing.assert_close(bias.grad, torch.ones_like(bias))
    empty = _key_columns(torch.full((1, 1, 1), -8e30), dtype)
    assert bool(empty.isfinite().all()) and float(empty[..., :3].float().sum()) < -6e4
