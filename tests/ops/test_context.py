"""Context parallelism of the operator: shards on two, three and four ranks give what one process gives, and little is sent."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from expire_span.errors import explain
from expire_span.ops import expire_attention
from expire_span.ops.context import ContextGroup, context_parallel, overlap
from expire_span.ops.context.exchange import Link
from tests.error_budget import assert_all_within_budget
from tests.operator_cases import LEAVES, Case
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
        names = [n for n in LEAVES if n in own]
        grads = torch.autograd.grad(y, [own[n] for n in names], context.shard(direction, 2))
        return {"y": y.detach()} | {f"d{n}": x for n, x in zip(names, grads)}


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all ranks as those of the whole sequence; gradients of shared weights are summed."""

    def join(name: str) -> Tensor:
        values = [part[name] for part in parts]
        return (
            sum(values[1:], values[0])
            if name in ("drelative_keys", "dsinks")
            else torch.cat(values, CUT.get(name[1:], 2))
        )

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
    more = draw(st.sampled_from(["no", "sinks", "softcap", "normalizer_eps"]))
    if more in ("softcap", "normalizer_eps"):
        options[more] = draw(st.sampled_from([0.1, 2.0]))
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
        sinks=more == "sinks",
        options=options,
        span_rows=draw(st.integers(0, kv_heads)),
    )
    return case, size


SETTINGS: Any = dict(
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


AFTER_ARRIVAL = Case(queries=60, options={"normalizer_eps": 0.1})
"""A case that is computed only once all memories have come: with an epsilon, normalisers cannot be joined."""


@example(drawn=(AFTER_ARRIVAL, 3), seed=0, dtype=torch.float64)
@settings(max_examples=40, **SETTINGS)
@given(drawn=cases(), seed=st.integers(0, 99), dtype=st.sampled_from([torch.float64, torch.float32]))
def test_shards_equal_the_whole(ranks, drawn, seed, dtype):
    check(ranks, *drawn, seed=seed, dtype=dtype)


@pytest.mark.long
@settings(max_examples=1500, **SETTINGS)
@given(drawn=cases(), seed=st.integers(0, 10**6), impl=st.sampled_from(["chunked", "reference"]))
def test_many_more_random_cases(ranks, drawn, seed, impl):
    check(ranks, *drawn, seed=seed, impl=impl)


# The exchange lies behind the attention to a rank's own memories


class Late:
    """A transfer whose rows leave only once they are waited for: the slowest transport there is."""

    def __init__(self, events: list[str], begin: Any) -> None:
        self.events, self.begin = events, begin
        events.append("begin")

    def wait(self) -> Any:
        self.events.append("wait")
        return self.begin().wait()


def over_a_slow_transport(group: Any, case: Case) -> tuple[list[str], dict[str, Tensor]]:
    """What happened, in order, and this rank's part of the output and of every gradient."""
    events: list[str] = []
    begin, attend = Link.begin, overlap.attend_to_part

    def attend_and_note(call: Any) -> Any:
        events.append("attend")
        part = attend(call)
        return replace(part, backward=lambda *given: events.append("differentiate") or part.backward(*given))

    try:
        Link.begin = lambda *given: Late(events, lambda: begin(*given))  # type: ignore[method-assign, assignment, return-value]
        overlap.attend_to_part = attend_and_note  # type: ignore[assignment]
        return events, on_rank(group, case, torch.float64, 0, "auto")
    finally:
        Link.begin, overlap.attend_to_part = begin, attend  # type: ignore[method-assign]


def test_memories_travel_while_a_rank_attends_to_its_own(ranks):
    """Of three ranks, the first gets no memories, and the last sends none but gets gradients ready first."""
    case = Case(queries=60, spans="mixed")
    found = ranks.call(over_a_slow_transport, 3, case)
    first = ["begin", "attend", "wait", "begin", "differentiate", "wait"]
    later = ["begin", "attend", "wait", "attend", "differentiate", "begin", "differentiate", "wait"]
    assert [events for events, _ in found] == [first, later, later]
    exact = whole(case, "reference", torch.float64, 0)
    assert_all_within_budget(joined([part for _, part in found]), exact, whole(case, "reference", torch.float32, 0))


# What is sent


SHAPE: dict[str, Any] = dict(batch=2, heads=8, kv_heads=4, dim=64)


def traffic_of(group: Any, case: Case, dtype: torch.dtype) -> tuple[Any, int]:
    """What this rank sent in a forward and backward pass, and the bytes of a key and value of one head."""
    with context_parallel(group) as context:
        whole = case_tensors(case, dtype, 0)
        own = {n: context.shard(x.detach(), CUT[n]).requires_grad_() for n, x in whole.items()}
        expire_attention(**own, ramp=RAMP).float().sum().backward()
        return context.traffic, 2 * case.dim * own["k"].element_size()


def survivors(case: Case, size: int, dtype: torch.dtype) -> list[int]:
    """By the definition of the weight: for each rank, the number of (memory, head, receiving rank) alive beyond its shard."""
    span, shard = case_tensors(case, dtype, 0)["span"].detach().float(), case.queries // size
    span = span if span.dim() == 3 else span.unsqueeze(1)
    heads, pos = case.kv_heads // span.shape[1], torch.arange(case.queries)
    alive = [(span - (rank * shard - pos) > -RAMP) & (pos < rank * shard) for rank in range(size)]
    return [
        heads * sum(int(alive[to][..., rank * shard : (rank + 1) * shard].sum()) for to in range(rank + 1, size))
        for rank in range(size)
    ]


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_sent_are_those_of_the_survivors(ranks, per_head, dtype):
    """Keys and values of every survivor once for each rank that can see it, a span and a position for each row, and at most
    2% more on the whole."""
    size, case = 4, Case(**SHAPE, queries=4 * 96, spans="mixed", per_head=per_head)
    found = ranks.call(traffic_of, size, case, dtype)
    heads_of_a_row = 1 if per_head else case.kv_heads
    exact, sent = 0, 0
    for (traffic, pair), count in zip(found, survivors(case, size, dtype)):
        rows = count // heads_of_a_row
        assert sum(traffic.pairs.values()) == rows
        assert traffic.memories == count * pair + rows * (4 + 8)
        exact, sent = exact + traffic.memories, sent + traffic.memories + traffic.headers
    # Gradients come back in the same precision, without positions, from the ranks that received the memories.
    back = sum(traffic.gradients for traffic, _ in found)
    assert back == sum(n * pair + n // heads_of_a_row * 4 for n, (_, pair) in zip(survivors(case, size, dtype), found))
    assert exact <= sent <= 1.02 * exact


def pair_bytes(case: Case, dtype: torch.dtype) -> int:
    return 2 * case.dim * dtype.itemsize * case.kv_heads


def test_a_twentieth_alive_sends_at_most_a_tenth_of_a_ring(ranks):
    """5% of each shard's memories live for ever. A causal ring passes a shard's keys and values on to every later rank."""
    size, case = 4, Case(**SHAPE, queries=4 * 256, spans="scattered")
    found = ranks.call(traffic_of, size, case, torch.float32)
    shard = case.batch * case.queries // size * pair_bytes(case, torch.float32)
    ring = shard * size * (size - 1) // 2
    sent = sum(traffic.memories + traffic.headers for traffic, _ in found)
    assert 0.03 < sent / ring < 0.1


# Bad input: one sentence on every rank


def with_fault(group: Any, fault: str) -> str:
    """What a rank is told if the last rank gives other arguments, or all of them do."""
    rank, last = dist.get_rank(group), dist.get_rank(group) == dist.get_world_size(group) - 1
    shape = (1, 2, 9 if fault == "length" and last else 10, 8)
    q, k, v = (
        torch.randn(shape, dtype=torch.float64 if fault == "dtype" and last else torch.float32) for _ in range(3)
    )
    span = torch.rand(1, shape[2]) * 9
    if fault == "nan" and last:
        span[0, 3] = math.nan
    options: dict[str, Any] = {"ramp": 5.0 if fault == "ramp" and last else 4.0}
    if fault == "documents":
        options["documents"] = torch.full((10,), 7 - rank)
    if fault == "cu_seqlens":
        options["cu_seqlens"] = [0, 10]
    if fault == "gradients" and last:
        k.requires_grad_()
    try:
        with context_parallel(group) as context:
            if fault == "shard":
                context.shard(torch.zeros(1, 11))
            expire_attention(q, k, v, span, **options)
            return "nothing"
    except ValueError as error:
        return str(error)


SENTENCES = {
    "length": "agree on the number of tokens a shard, got 10 on rank 0 and 9 on rank 2",
    "dtype": "agree on the dtype of q, got float32 on rank 0 and float64 on rank 2",
    "ramp": "agree on the ramp, got 4 on rank 0 and 5 on rank 2",
    "nan": "span must not be NaN, got 1 NaN of 10 values",
    "documents": "documents must not decrease along the ranks of a context group, got 7 on rank 0 and 6 on rank 1",
    "cu_seqlens": "cu_seqlens must begin with 0 and end with the number of queries, 30",
    "gradients": "agree on the need of gradients of k and v, got False on rank 0 and True on rank 2",
    "shard": "the ranks of a context group must divide the sequence, got 11 tokens and 3 ranks",
}


@pytest.mark.parametrize("fault", SENTENCES)
def test_faults_are_told_on_every_rank(ranks, fault):
    told = ranks.call(with_fault, 3, fault)
    assert all(SENTENCES[fault] in text for text in told), told
    if fault == "nan":
        assert told[0].startswith("rank 2 of the context group refused its input: ")
    check(ranks, Case(queries=30), 3)  # and the group still works


def nested(group: Any) -> str:
    with context_parallel(group), pytest.raises(ValueError) as found, context_parallel(group):
        pass
    return str(found.value)


def test_a_context_needs_its_processes(ranks):
    with pytest.raises(ValueError, match=r"a context group needs torch\.distributed, which is not initialised"):
        ContextGroup(None)
    assert "contexts do not nest" in ranks.call(nested, 2)[0]
    assert "is not in the context group" in ranks.call(outside, 3)[2]


def outside(group: Any) -> str:
    try:
        ContextGroup(
            dist.GroupMember.NON_GROUP_MEMBER
        )  # what new_group gives to processes that are not in the new group
        return "in"
    except ValueError as error:
        return str(error)


def compiled(group: Any, case: Case) -> float:
    """The largest difference of compiled code to eager code, in a context."""
    attend = torch.compile(lambda *x: 2 * expire_attention(*x, ramp=RAMP), backend="eager")
    with context_parallel(group) as context:
        own = [context.shard(x.detach(), CUT[n]) for n, x in case_tensors(case, torch.float64, 0).items()]
        return float((attend(*own) - 2 * expire_attention(*own, ramp=RAMP)).abs().max())


def test_compiled_code_calls_the_exchange_between_graphs(ranks):
    assert ranks.call(compiled, 2, Case(queries=40)) == [0.0, 0.0]


def on_a_mesh(group: Any) -> int:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    with context_parallel(mesh["context"]) as context:
        return context.rank


def test_a_context_is_one_dimension_of_a_device_mesh(ranks):
    assert ranks.call(on_a_mesh, 4) == [0, 1, 0, 1]


def bereft(group: Any) -> str:
    """Rank 1 is killed while rank 0 waits for its memories: what rank 0's command says."""
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x = torch.randn(1, 2, 10, 8)
    try:
        with context_parallel(group):
            expire_attention(x, x, x, torch.ones(1, 10), ramp=1)
        return "nothing"
    except RuntimeError as error:
        return (explain(error) or ("a traceback", 1))[0]


def test_a_killed_rank_ends_the_others_with_a_sentence():
    with Ranks(2) as pair:
        told = pair.call(bereft, 2, among=[0])
    assert "another process of this run has ended or does not answer" in told[0]
