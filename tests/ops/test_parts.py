"""Memories that are read in two parts and joined give the output and the gradients of one reading."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expire_span.ops.call import Call
from expire_span.ops.parts import attend_to_part, can_read_parts, join_parts
from tests.error_budget import assert_all_within_budget
from tests.operator_cases import LEAVES, Case
from tests.triton_interpreter import DEVICE, ON_GPU, small_tiles

RAMP = 7.0


def call_of(case: Case, inputs: dict[str, Tensor], impl: str) -> Call:
    options = dict(include_self=True, normalizer_eps=0.0, softcap=0.0, causal=True) | case.options
    tensors = {name: x.detach() for name, x in inputs.items() if not name.endswith("pos")}
    more: dict[str, Any] = {"relative_keys": None, "sinks": None, **tensors, **options}
    more |= {name: inputs[name] for name in ("q_pos", "k_pos")}
    scale = 1 / math.sqrt(case.dim)
    return Call(ids=None, ramp=RAMP, scale=scale, deterministic=False, check=False, impl=impl, **more)


def read_in_two(case: Case, impl: str, cut: int, dtype: torch.dtype, seed: int, device: str) -> dict[str, Tensor]:
    """The output and all gradients where the first `cut` memories are one part and the others another."""
    inputs = {name: x.detach().to(device) for name, x in case.tensors(dtype, seed).items()}
    call = call_of(case, inputs, impl)
    assert can_read_parts(call)
    halves = []
    for n, part in enumerate((slice(0, cut), slice(cut, None))):
        k, v, span, k_pos = call.k[:, :, part], call.v[:, :, part], call.span[..., part], call.k_pos[part]
        halves.append(replace(call, k=k, v=v, span=span, k_pos=k_pos, sinks=call.sinks if n else None))
    parts = [attend_to_part(half) for half in halves]
    y, log = join_parts(parts)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed + 1)).to(call.q)
    a, b = (part.backward(direction, y.to(call.q.dtype), log) for part in parts)
    grads = [a[0] + b[0], *(torch.cat(pair, 2) for pair in zip(a[1:3], b[1:3])), torch.cat([a[3], b[3]], -1)]
    relative = None if a[4] is None or b[4] is None else a[4] + b[4]
    found = dict(zip((f"d{name}" for name in LEAVES), (*grads, relative, b[5])))
    return {"y": y} | {name: x for name, x in found.items() if name[1:] in inputs and x is not None}


def check(case: Case, impl: str, cut: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> None:
    got = read_in_two(case, impl, cut, dtype, seed, device)
    exact, coarse = (case.run("reference", kind, RAMP, seed) for kind in (torch.float64, torch.float32))
    assert got.keys() == exact.keys()
    assert_all_within_budget({name: x.cpu() for name, x in got.items()}, exact, coarse)


@st.composite
def cases(draw: Any) -> Case:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return Case(
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        queries=draw(st.integers(1, 100)),
        stored=draw(st.integers(1, 40)),
        dim=draw(st.sampled_from([3, 8])),
        spans=draw(st.sampled_from(["mixed", "short", "alive", "expired", "scattered", "edges"])),
        gaps=draw(st.booleans()),
        relative=draw(st.sampled_from([0, 0, 5])),
        sinks=draw(st.booleans()),
        span_rows=draw(st.integers(0, kv_heads)),
        options={"include_self": draw(st.booleans()), "softcap": draw(st.sampled_from([0.0, 0.0, 2.0]))},
    )


@settings(max_examples=20, deadline=None)
@given(case=cases(), cut=st.integers(1, 40), seed=st.integers(0, 99))
def test_two_parts_equal_the_whole(case, cut, seed):
    check(case, "chunked", cut, torch.float64, seed)


def test_long_lives_take_the_fused_kernel():
    check(Case(1, 2, 2, queries=1100, spans="alive"), "chunked", 700, torch.float64)


KERNELS = {
    "spans per head, sinks, soft caps": Case(
        1, 2, 2, 12, stored=9, per_head=True, sinks=True, options={"softcap": 3.0}
    ),
}
MORE_KERNELS = {
    "relative, eps, born on the ramp": Case(
        1, 2, 1, 20, stored=9, relative=6, spans="short", options={"normalizer_eps": 0.1}
    ),
    "mixed": Case(queries=63, stored=20),
    "long": Case(2, 4, 2, 300, stored=111, dim=64, gaps=True),
}


@pytest.mark.usefixtures(small_tiles.__name__)
@pytest.mark.parametrize("case", [pytest.param(c, id=n, marks=[pytest.mark.gpu] * ON_GPU) for n, c in KERNELS.items()])
def test_the_kernels_return_normalizers_too(case):
    check(case, "triton", 13, torch.float32, device=DEVICE)


@pytest.mark.long
@pytest.mark.usefixtures(small_tiles.__name__)
@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=[pytest.mark.gpu] * ON_GPU) for n, c in MORE_KERNELS.items()]
)
def test_the_kernels_return_normalizers_in_larger_cases(case):
    check(case, "triton", 29, torch.float32, device=DEVICE)


def test_what_has_no_normalizer_is_read_at_once():
    plain = Case(queries=5)
    call = call_of(plain, plain.tensors(), "chunked")
    assert not can_read_parts(replace(call, impl="reference"))
    assert not can_read_parts(replace(call, normalizer_eps=0.1))
