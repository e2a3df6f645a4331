"""Context parallelism of the operator: shards on two, three and four ranks give what one process gives, and little is sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from expire_span.ops import expire_attention
from expire_span.ops.context import context_parallel
from tests.error_budget import assert_all_within_budget
from tests.operator_cases import GRADS, Case
from tests.ranks import Ranks

RAMP = 7.0
CUT = {"q": 2, "k": 2, "v": 2, "span": -1, "q_pos": -1, "k_pos": -1}
"""The dimension along which each argument is cut into shards."""


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as found:
        yield found


def case_tensors(case: Case, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """A case's tensors, with default positions unless it has gaps."""
    tensors = case.tensors(dtype, seed)
    return tensors if case.gaps else {name: x for name, x in tensors.items() if not name.endswith("pos")}


def on_rank(group: Any, case: Case, dtype: torch.dtype, seed: int, impl: str) -> dict[str, Tensor]:
    """This rank's part of the output and of every gradient."""
    with context_parallel(group) as context:
        whole = case_tensors(case, dtype, seed)
        own = {n: context.shard(x.detach(), CUT[n]).contiguous() if n in CUT else x.detach() for n, x in whole.items()}
        own = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in own.items()}
        options = dict(case.options)
        if "documents" in options:
            options["documents"] = context.shard(options["documents"], -1)
        y = expire_attention(**own, ramp=RAMP, impl=impl, **options)
        direction = torch.randn(whole["q"].shape, generator=torch.Generator().manual_seed(seed + 1)).to(y)
        names = [n for n in (*GRADS, "relative_keys") if n in own]
        grads = torch.autograd.grad(y, [own[n] for n in names], context.shard(direction, 2))
        return {"y": y.detach()} | {f"d{n}": x for n, x in zip(names, grads)}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all ranks as those of the whole sequence; gradients of shared weights are summed."""

    def join(name: str) -> Tensor:
        values = [part[name] for part in parts]
        return sum(values[1:], values[0]) if name == "drelative_keys" else torch.cat(values, CUT.get(name[1:], 2))

    return {name: join(name) for name in parts[0]}


def whole(case: Case, impl: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    return case.run(impl, dtype, RAMP, seed)


def check(ranks: Ranks, case: Case, size: int, seed: int = 0, impl: str = "auto", dtype=torch.float64) -> None:
    got = joined(ranks.call(on_rank, size, case, dtype, seed, impl))
    exact = whole(case, "reference", torch.float64, seed)
    assert_all_within_budget(got, exact, whole(case, "reference", torch.float32, seed))
    if dtype == torch.float64:
        for name, x in exact.items():
            torch.testing.assert_close(got[name], x, rtol=1e-5, atol=1e-5)


@st.composite
def cases(draw: Any) -> tuple[Case, int]:
    size = draw(st.sampled_from([2, 3, 4]))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    count = size * draw(st.integers(1, 40))
    options: dict[str, Any] = {"causal": draw(st.booleans()), "include_self": draw(st.booleans())}
    packed = draw(st.sampled_from(["no", "ids", "cu_seqlens"]))
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=4)))
    bounds = [0, *cuts, count]
    if packed == "cu_seqlens":
        options["cu_seqlens"] = bounds
    if packed == "ids":
        options["documents"] = torch.searchsorted(torch.tensor(bounds), torch.arange(count), right=True)
    case = Case(
        batch=draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        queries=count,
        dim=draw(st.sampled_from([3, 8])),
        spans=draw(st.sampled_from(["mixed", "short", "alive", "expired", "scattered", "edges"])),
        gaps=draw(st.booleans()),
        relative=draw(st.sampled_from([0, 0, 5])),
        options=options,
        span_rows=draw(st.integers(0, kv_heads)),
    )
    return case, size


SETTINGS: Any = dict(
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


@settings(max_examples=40, **SETTINGS)
@given(drawn=cases(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_shards_equal_the_whole(ranks, drawn, seed, dtype):
    check(ranks, *drawn, seed=seed, dtype=dtype)


@pytest.mark.long
@settings(max_examples=1500, **SETTINGS)
@given(drawn=cases(), seed=st.integers(0, 10**6), impl=st.sampled_from(["chunked", "reference"]))
def test_many_more_random_cases(ranks, drawn, seed, impl):
    check(ranks, *drawn, seed=seed, impl=impl)
