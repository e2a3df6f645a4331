"""expire_attention: its definition, the agreement of implementations, and what it refuses."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span.ops import expire_attention, fused
from expire_span.ops.chunked import chunked_attention
from expire_span.ops.live import live_queries, ramp_loss
from expire_span.ops.reference import ages, expiry_mask, ramp_loss_dense
from tests.error_budget import DOUBLE, assert_all_within_budget, assert_within_budget
from tests.operator_cases import Case, as_dtype, assert_same

CASES = {
    "one query": Case(queries=1),
    "one query, long store": Case(queries=1, stored=111, gaps=True),
    "63": Case(),
    "111 in a store": Case(queries=111, stored=40),
    "several chunks": Case(queries=600, stored=300, spans="scattered"),
    "all alive": Case(queries=300, spans="alive"),
    "all expired": Case(queries=111, spans="expired"),
    "born on the ramp": Case(queries=300, stored=40, spans="short", gaps=True),
    "encoder, born on the ramp": Case(queries=300, spans="short", options={"causal": False}),
    "ramp edges": Case(queries=111, stored=20, spans="edges"),
    "a million steps in": Case(queries=300, start=10**6, gaps=True),
    "a billion steps in": Case(queries=300, start=10**9),
    "spans per head": Case(queries=300, per_head=True, spans="scattered"),
    "two heads share spans": Case(queries=300, heads=6, kv_heads=3, span_rows=2, spans="scattered"),
    "one row of spans": Case(queries=63, span_rows=1),
    "one row": Case(batch=1, queries=300, spans="scattered"),
    "one head": Case(heads=1, kv_heads=1),
    "no self": Case(queries=300, options={"include_self": False}),
    "encoder": Case(queries=300, options={"causal": False}),
    "encoder, no self, per head": Case(per_head=True, options={"causal": False, "include_self": False}),
    "relative keys": Case(queries=300, stored=30, relative=16, options={"include_self": False}),
    "soft caps": Case(queries=111, stored=30, options={"softcap": 1.5}),
    "soft caps and sinks, no self": Case(sinks=True, relative=8, options={"softcap": 5.0, "include_self": False}),
    "sinks, encoder": Case(queries=40, sinks=True, per_head=True, spans="scattered", options={"causal": False}),
    "sinks, all expired": Case(queries=40, sinks=True, spans="short", options={"include_self": False}),
    "normaliser eps": Case(relative=8, options={"include_self": False, "normalizer_eps": 1e-3}),
}


@pytest.mark.parametrize("name", CASES)
def test_chunked_equals_the_definition_in_float64(name):
    assert_same(CASES[name], "chunked")


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if not c.relative and c.queries > 63])
def test_the_fused_kernel_of_the_cpu_equals_the_definition(monkeypatch, name):
    """It computes long chunks, as memories that live long have them."""
    monkeypatch.setattr("expire_span.ops.problem.FUSED_FROM", 1)
    assert_same(CASES[name], "chunked")


@pytest.mark.parametrize("dtype, factor", [(torch.float32, 4), (torch.bfloat16, 2), (torch.float16, 2)])
def test_low_precision_stays_within_the_reference_error_of_that_precision(dtype, factor):
    case = Case(queries=300, stored=40, spans="mixed")
    exact, rounded, got = case.run("reference"), case.run("reference", dtype), case.run("chunked", dtype)
    assert_all_within_budget(got, exact, rounded, factor)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3),
    group=st.sampled_from([1, 2]),
    queries=st.integers(1, 70),
    stored=st.integers(0, 40),
    per_head=st.booleans(),
    spans=st.sampled_from(["mixed", "scattered", "edges", "expired", "alive"]),
    gaps=st.booleans(),
    include_self=st.booleans(),
    causal=st.booleans(),
    chunk=st.sampled_from([1, 7, 32]),
    ramp=st.sampled_from([1.0, 5.0, 16.0]),
)
def test_any_shape_and_chunk_length(
    batch, group, queries, stored, per_head, spans, gaps, include_self, causal, chunk, ramp
):
    case = Case(batch, 2 * group, 2, queries, stored, 8, per_head, spans, gaps=gaps)
    case.options = {"include_self": include_self, "causal": causal}
    x = case.tensors()
    want, single = (
        expire_attention(**as_dtype(x, dtype), ramp=ramp, impl="reference", **case.options)
        for dtype in (torch.float64, torch.float32)
    )
    span = x["span"] if per_head else x["span"].unsqueeze(1)
    k_pos = x["k_pos"].expand(span.shape)
    q_pos = x["q_pos"].expand(batch, 1, -1)
    scale = 1 / math.sqrt(8)
    options = dict(ramp=ramp, scale=scale, chunk=chunk, **case.options)
    got = chunked_attention(x["q"], x["k"], x["v"], span, q_pos, k_pos, **options)
    assert_within_budget(got, want, single)


@pytest.mark.parametrize("name", ["one query", "one query, long store", "five queries", "five, per head", "dead"])
def test_decoding_equals_the_definition(name):
    """A few queries without gradient take a shorter way."""
    case = {
        "five queries": Case(queries=5, stored=70, spans="scattered", options={"include_self": False}),
        "five, per head": Case(queries=5, stored=70, per_head=True),
        "dead": Case(queries=3, stored=20, spans="expired", options={"include_self": False}),
    }.get(name) or CASES[name]
    x = case.tensors()
    with torch.no_grad():
        for ramp in (1.0, 7.0):
            want, single = (
                expire_attention(**as_dtype(x, dtype), ramp=ramp, impl="reference", **case.options)
                for dtype in (torch.float64, torch.float32)
            )
            assert_within_budget(expire_attention(**x, ramp=ramp, **case.options), want, single)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scores_that_are_not_positive_multiples(scale):
    """PyTorch's fused causal kernel gives NaN for them, so that it must not be called."""
    x = {
        n: t.double().requires_grad_()
        for n, t in Case(1, 2, 2, 9, 0, 8, False, "alive").tensors().items()
        if n in "qkv"
    }
    span = torch.full((1, 9), 100.0)
    found = {}
    for impl, dtype in (("reference", torch.float64), ("chunked", torch.float32)):
        y = expire_attention(*(x[n].to(dtype) for n in "qkv"), span, ramp=4.0, scale=scale, impl=impl)
        found[impl] = [y, *torch.autograd.grad(y.sum(), list(x.values()))]
    for want, got in zip(*found.values()):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spans, whole", [("alive", True), ("scattered", False)])
def test_plain_causal_attention_is_one_call_of_the_fused_kernel(monkeypatch, spans, whole):
    """Where nothing fades there is nothing to list; grouped heads, outputs and gradients as in the definition."""
    calls = []
    monkeypatch.setattr("expire_span.ops.problem.FUSED_FROM", 1)
    for name in ("forward", "forward_whole", "backward", "backward_whole"):
        plain = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *args, n=name, f=plain: (calls.append(n), f(*args))[1])
    assert_same(Case(queries=150, heads=4, kv_heads=2, spans=spans), "chunked")
    assert set(calls) == ({"forward_whole", "backward_whole"} if whole else {"forward", "backward"})


def test_gradients_by_finite_differences():
    _check_gradients(Case(batch=1, heads=2, kv_heads=1, queries=6, stored=3, dim=4, relative=3))


def test_gradients_by_finite_differences_of_the_fused_kernel(monkeypatch):
    monkeypatch.setattr("expire_span.ops.problem.FUSED_FROM", 1)
    _check_gradients(Case(batch=1, heads=2, kv_heads=1, queries=6, stored=3, dim=4))


def _check_gradients(case: Case) -> None:
    x = case.tensors()
    x["span"] = (torch.rand(1, 9, dtype=torch.float64) * 6 + 0.3).requires_grad_()

    def run(q, k, v, span, relative_keys=None):
        pos = {"q_pos": x["q_pos"], "k_pos": x["k_pos"]}
        return expire_attention(q, k, v, span, **pos, ramp=4, relative_keys=relative_keys, impl="chunked")

    names = ("q", "k", "v", "span", "relative_keys")
    assert torch.autograd.gradcheck(run, tuple(x[n] for n in names if x.get(n) is not None))


def test_a_deleted_memory_changes_nothing():
    """If every memory that is dead for the first query is dropped, outputs and gradients stay the same."""
    x = Case(batch=1, queries=40, stored=200, spans="mixed").tensors()
    alive = (x["span"][0] + 7 > x["q_pos"][0] - x["k_pos"]).detach()
    assert 20 < int(alive.sum()) < 200
    kept = {n: t[:, :, alive] if n in "kv" else t[:, alive] if n == "span" else t for n, t in x.items()}
    kept["k_pos"] = x["k_pos"][alive]
    single = expire_attention(**as_dtype(x, torch.float32), ramp=7.0, impl="reference")
    for impl in ("reference", "chunked"):
        y, z = (expire_attention(**inputs, ramp=7.0, impl=impl) for inputs in (x, kept))
        assert_within_budget(z, y, single)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_packed_documents_come_out_as_each_would_alone(impl):
    """Forward and every gradient, with spans that reach across the borders and positions that go on over them."""
    bounds, g = [0, 5, 6, 40], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, 40, 8, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))
    span = (torch.rand(2, 40, generator=g, dtype=torch.float64) * 60).requires_grad_()
    pos = torch.arange(40)

    def alone(a: int, b: int) -> torch.Tensor:
        parts = (x[:, :, a:b] for x in (q, k, v))
        return expire_attention(*parts, span[:, a:b], pos[a:b], pos[a:b], ramp=8, impl=impl)

    packed = expire_attention(q, k, v, span, pos, pos, ramp=8, impl=impl, cu_seqlens=bounds)
    apart = torch.cat([alone(a, b) for a, b in pairwise(bounds)], 2)
    weight = torch.randn(packed.shape, generator=g, dtype=torch.float64)
    results = [torch.autograd.grad((y * weight).sum(), (q, k, v, span)) for y in (packed, apart)]
    for got, want in zip((packed, *results[0]), (apart, *results[1])):
        torch.testing.assert_close(got, want, rtol=0, atol=DOUBLE)


def test_a_query_with_no_living_memory_gets_zero():
    case = Case(queries=20, spans="expired", options={"include_self": False})
    for impl in ("reference", "chunked"):
        out = case.run(impl, ramp=1.0)  # age 1 is already dead
        assert all(torch.count_nonzero(x) == 0 and x.isfinite().all() for x in out.values())


def test_no_memory_at_all():
    none, pos = torch.zeros(2, 2, 0, 16), torch.zeros(0, dtype=torch.int64)
    for impl in ("reference", "chunked"):
        y = expire_attention(
            torch.ones(2, 4, 5, 16), none, none, torch.zeros(2, 0), torch.arange(5), pos, ramp=1, impl=impl
        )
        assert y.shape == (2, 4, 5, 16) and torch.count_nonzero(y) == 0


def test_half_expired_row():
    """One row with nothing alive beside one with everything alive."""
    x = Case(batch=2, queries=40).tensors()
    with torch.no_grad():
        x["span"][0], x["span"][1] = 0, 1e6
    x["span"] = x["span"].detach()
    both = expire_attention(**x, ramp=1.0, include_self=False, impl="chunked")
    assert torch.count_nonzero(both[0]) == 0
    last = {n: x[n][1:] for n in "qkv"} | {"q": x["q"][1:, :, 1:]}
    seen = torch.ones(39, 40, dtype=torch.bool).tril(0)
    assert_within_budget(both[1:, :, 1:], *_dense_attention(last, attn_mask=seen))


def test_everything_alive_is_causal_softmax_attention():
    x = Case(queries=300, spans="alive").tensors()
    assert_within_budget(expire_attention(**x, ramp=7.0), *_dense_attention(x, is_causal=True))


def _dense_attention(x: dict[str, torch.Tensor], **options) -> list[torch.Tensor]:
    """PyTorch's own attention over the same queries, keys and values, in float64 and in float32."""
    attend = torch.nn.functional.scaled_dot_product_attention
    group = x["q"].shape[1] // x["k"].shape[1]
    q, k, v = x["q"], x["k"].repeat_interleave(group, 1), x["v"].repeat_interleave(group, 1)
    return [attend(q.to(dtype), k.to(dtype), v.to(dtype), **options) for dtype in (torch.float64, torch.float32)]


@pytest.mark.parametrize("include_self", [True, False])
@given(span=st.integers(-1280, 3200).map(lambda n: n / 64), ramp=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_a_memory_is_readable_at_the_ages_the_formula_says(include_self, span, ramp):
    """A memory is readable at `ceil(e) + R - 1` ages of at least 1, and at age 0 if a token sees itself."""
    span = max(span, -ramp)
    spans = torch.tensor([[span]], dtype=torch.float64)
    age = ages(torch.arange(200)[None], torch.zeros(1, 1, dtype=torch.int64), causal=True)
    alive = (expiry_mask(spans, age, ramp=ramp, include_self=include_self) > 0).sum()
    assert alive == max(math.ceil(span) + ramp - 1 + include_self, 0)
    counted = live_queries(spans, torch.zeros(1, 1), 0, 199, ramp=ramp, include_self=include_self)
    assert counted == alive


@given(seed=st.integers(0, 1000), first=st.integers(0, 60), count=st.integers(1, 40), ramp=st.integers(1, 20))
@settings(max_examples=50, deadline=None)
def test_closed_form_ramp_loss_equals_the_sum_over_pairs(seed, first, count, ramp):
    g = torch.Generator().manual_seed(seed)
    span = (torch.rand(2, 50, generator=g, dtype=torch.float64) * 60 - ramp).requires_grad_()
    k_pos = torch.arange(50).expand(2, -1)
    q_pos = torch.arange(first, first + count).expand(2, -1)
    want = ramp_loss_dense(span, q_pos, k_pos, ramp=ramp)
    got = ramp_loss(span, k_pos, first, first + count - 1, ramp=ramp)
    # A sum of n terms of size 1 at most is rounded n - 1 times, each time by at most n units in the last digit.
    eps, terms = torch.finfo(torch.float64).eps, 50 * count
    torch.testing.assert_close(got, want, rtol=0, atol=terms**2 * eps)
    wanted_grad = torch.autograd.grad(want.sum(), span)[0]
    torch.testing.assert_close(torch.autograd.grad(got.sum(), span)[0], wanted_grad, rtol=0, atol=count**2 * eps)


def test_poisoned_buffers_do_not_leak(monkeypatch):
    """Nothing uninitialised is ever read."""
    real = torch.empty

    def poisoned(*args, **kwargs):
        out = real(*args, **kwargs)
        return out.fill_(torch.nan) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)
    case = Case(queries=111, stored=40, spans="scattered")
    assert_same(case, "chunked")


def test_autocast_and_its_gradients():
    x = Case(queries=63).tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = expire_attention(**x, ramp=7.0)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x["q"].grad.dtype == torch.float32 and x["span"].grad.isfinite().all()


@pytest.mark.slow
def test_compiled_equals_eager():
    x = Case(queries=63).tensors(torch.float32)

    def run(q, span):
        return expire_attention(q * 2, x["k"], x["v"], span, x["q_pos"], x["k_pos"], ramp=7.0) + 1

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for fn in (run, compiled):
        y = fn(x["q"], x["span"])
        grads = torch.autograd.grad(y.square().sum(), [x["q"], x["span"]])
        if fn is run:
            want = (y, *grads)
    torch.testing.assert_close((y, *grads), want)


def test_memory_is_linear_in_length():
    """No score outlives its chunk: what autograd keeps are the inputs and the output."""
    kept = []
    for queries in (512, 1024):
        sizes: list[int] = []
        x = Case(batch=1, queries=queries, spans="alive").tensors(torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t):
            expire_attention(**x, ramp=7.0, impl="chunked")
        kept.append(sum(sizes))
    assert kept[1] <= 2 * kept[0]


BAD = {
    "span shape": (dict(span=torch.ones(2, 62)), r"span must have shape \(2, 63\) or \(2, 2, 63\), got \(2, 62\)"),
    "span below the ramp": (
        dict(span=-8 * torch.ones(2, 63)),
        "span must be -ramp or more, -7 here, got a smallest value of -8",
    ),
    "nan span": (dict(span=torch.full((2, 63), torch.nan)), "span must not be NaN, got 126 NaN of 126"),
    "integer span": (
        dict(span=torch.ones(2, 63, dtype=torch.int64)),
        "span must be a float tensor .*, got torch.int64",
    ),
    "ramp": (dict(ramp=0), "ramp must be at least .* and at most .*, got 0"),
    "documents": (
        dict(k_pos=torch.arange(63) % 40),
        "k_pos must not decrease along a row, got 39 then 0 at index 39; packed documents are given by cu_seqlens or documents",
    ),
    "order": (dict(k_pos=torch.arange(63).flip(0)), "k_pos must not decrease along a row, got 62 then 61 at index 0"),
    "float positions": (dict(q_pos=torch.zeros(63)), "q_pos must be an integer tensor, got torch.float32"),
    "heads": (dict(q=torch.ones(2, 3, 63, 16)), "the heads of k must divide those of q, got 2 and 3"),
    "k shape": (dict(v=torch.ones(2, 2, 60, 16)), r"v must have shape \(2, 2, 63, 16\), got \(2, 2, 60, 16\)"),
    "rank": (dict(q=torch.ones(2, 63, 16)), "must have 4 dimensions"),
    "devices": (dict(span=torch.ones(2, 63, device="meta")), "span is on meta but q is on cpu"),
    "relative": (dict(relative_keys=torch.ones(4, 3)), r"relative_keys must have shape \(M, 16\), got \(4, 3\)"),
    "impl": (dict(impl="fast"), "impl must be one of auto, reference, chunked, triton, got 'fast'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_with_its_values(name):
    change, message = BAD[name]
    inputs = {n: t.detach() for n, t in Case().tensors(torch.float32).items()}
    with pytest.raises(ValueError, match=message):
        expire_attention(**({"ramp": 7.0} | inputs | change))
