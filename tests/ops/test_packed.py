"""Packed documents against the same documents one by one: every implementation, every dtype, gradients included."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from expire_span.ops import expire_attention
from expire_span.ops.lists import live_lists
from tests.error_budget import DOUBLE, assert_all_within_budget
from tests.hf_models import forgetful, tiny, tokens

GRADS = ("q", "k", "v", "span")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORMS = {
    "causal": {},
    "encoder": {"causal": False},
    "no self": {"include_self": False},
    "relative keys": {"relative": 5, "include_self": False},
    "normaliser eps": {"normalizer_eps": 1e-3},
}
BLOCK = 4096
"""Tokens whose scores the definition may hold at once."""


def problem(length: int, dtype: torch.dtype, seed: int, dim: int = 8) -> dict[str, Tensor]:
    """Two heads with spans of their own: many short ones, and some that would reach over many documents."""
    g = torch.Generator().manual_seed(seed)
    x = {n: torch.randn(1, 2, length, dim, generator=g) for n in "qkv"}
    far = torch.rand(1, 2, length, generator=g) < 0.02
    x["span"] = torch.rand(1, 2, length, generator=g) * torch.where(far, float(length), 40.0)
    return {n: t.to(dtype) for n, t in x.items()}


def cut(length: int, documents: int, seed: int) -> list[int]:
    """Boundaries of documents of random lengths, of which some are empty."""
    g = torch.Generator().manual_seed(seed)
    return [0, *torch.randint(0, length + 1, (documents - 1,), generator=g).sort().values.tolist(), length]


def run(x: dict[str, Tensor], bounds: list[int], *, packed: bool, impl: str, relative: int = 0, **options) -> dict:
    """Output and gradients, of the documents packed into one row or one by one."""
    x = {n: t.detach().clone().requires_grad_() for n, t in x.items()}
    if relative:
        options["relative_keys"] = torch.linspace(-1, 1, relative * x["q"].shape[-1]).to(x["q"]).view(relative, -1)
    options |= {"ramp": 8.0, "impl": impl}
    if packed:
        y = expire_attention(**x, **options, cu_seqlens=bounds)
    else:
        pieces = ({n: t[..., a:b, :] if n in "qkv" else t[..., a:b] for n, t in x.items()} for a, b in pairwise(bounds))
        y = torch.cat([expire_attention(**piece, **options) for piece in pieces], 2)
    grads = torch.autograd.grad(y.double().square().sum(), [x[n] for n in GRADS])
    return dict(zip(("y", *GRADS), (t.detach() for t in (y, *grads))))


def assert_packed_equals_apart(length: int, documents: int, dtype: torch.dtype, seed: int, impl: str, **form) -> None:
    x, bounds = problem(length, dtype, seed), cut(length, documents, seed)
    wide = {n: t.double() for n, t in x.items()} | {"span": x["span"]}
    if dtype == torch.float64:
        coarse = {n: t.float() for n, t in x.items()}
    else:
        wide["span"], coarse = x["span"].float(), x
    oracle = "reference" if max(b - a for a, b in pairwise(bounds)) <= BLOCK else "chunked"
    exact, rounded = (run(t, bounds, packed=False, impl=oracle, **form) for t in (wide, coarse))
    assert_all_within_budget(run(x, bounds, packed=True, impl=impl, **form), exact, rounded)


@pytest.mark.parametrize("form", FORMS)
def test_a_hundred_documents_come_out_as_each_would_alone(form):
    x, bounds = problem(400, torch.float64, 0), cut(400, 100, 0)
    apart = run(x, bounds, packed=False, impl="reference", **FORMS[form])
    for impl in ("reference", "chunked"):
        packed = run(x, bounds, packed=True, impl=impl, **FORMS[form])
        for name, want in apart.items():
            torch.testing.assert_close(packed[name], want, rtol=0, atol=DOUBLE, msg=lambda m, n=name: f"{n}: {m}")


def test_a_long_row_of_documents():
    """So many tokens that lifetimes lose their digits if documents are told apart by positions far from each other."""
    assert_packed_equals_apart(6144, 64, torch.float32, 1, "chunked")


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float32) for form in FORMS), *(("causal", x) for x in DTYPES if x != torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("length", "documents"), [(2000, 250), (16384, 150)])
def test_longer_rows_of_documents(length, documents, form, dtype):
    if form == "encoder":
        length = min(length, 4096)  # its lists are built from all memories
    assert_packed_equals_apart(length, documents, dtype, 2, "chunked", **FORMS[form])


@pytest.mark.long
@pytest.mark.parametrize("documents", [100, 400])
def test_the_longest_rows_of_documents(documents):
    assert_packed_equals_apart(65536, documents, torch.float32, 2, "chunked")


def test_a_few_queries_over_carried_memories_of_several_documents():
    """Queries of the last two documents over memories of five, with and without gradients."""
    x = problem(1200, torch.float64, 3)
    ids, pos = torch.arange(1200) // 250, torch.arange(1200) + 10**9
    for count in (7, 230):
        part = x | {"q": x["q"][:, :, -count:], "q_pos": pos[-count:], "k_pos": pos}
        pair = (ids[-count:], ids)
        want = expire_attention(**part, ramp=8.0, impl="reference", documents=pair)
        for impl in ("chunked", "reference"):
            got = expire_attention(**part, ramp=8.0, impl=impl, documents=pair)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        own = ids == ids[-1]
        alone = {n: t[:, :, own] if t.dim() > 2 else t[own] for n, t in (x | {"q_pos": pos, "k_pos": pos}).items()}
        last = min(count, int(own.sum()))
        alone_y = expire_attention(**alone, ramp=8.0, impl="reference")[:, :, -last:]
        torch.testing.assert_close(want[:, :, -last:], alone_y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", [0, 2**24, 2**40, 2**53, 2**61])
@pytest.mark.parametrize("causal", [True, False])
def test_lifetimes_do_not_depend_on_where_positions_begin(start, causal):
    """Two halves 2**52 steps apart, far from 0: no lifetime may be added to a position in floating point."""
    x, g = problem(400, torch.float64, 4), torch.Generator().manual_seed(4)
    pos = torch.randint(0, 3, (400,), generator=g).cumsum(0) + start
    pos[200:] += 2**52
    options = dict(ramp=2.0, causal=causal, q_pos=pos, k_pos=pos)
    got, want = (expire_attention(**x, **options, impl=impl) for impl in ("chunked", "reference"))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_lists_hold_every_living_memory_and_little_else():
    """Float32 spans beyond 2**24 included, where a lifetime is rounded to whole numbers of several steps."""
    g = torch.Generator().manual_seed(5)
    scale = 2.0 ** torch.randint(0, 27, (1, 300), generator=g)
    span, k_pos = torch.rand(1, 300, generator=g) * scale, torch.randint(0, 2**20, (1, 300), generator=g).sort().values
    q_pos = torch.randint(2**20, 2**27, (1, 200), generator=g).sort().values
    living = span.unsqueeze(1) + 3.0 > (q_pos.unsqueeze(2) - k_pos.unsqueeze(1)).float()
    for live in live_lists(span, q_pos, k_pos, ramp=3.0, causal=True, include_self=True, chunk=1):
        listed = torch.zeros(300, dtype=torch.bool)
        listed[live.index[0] if live.window is None else slice(*live.window)] = True
        seen = living[0, live.start]
        assert bool((listed | ~seen).all()) and int((listed & ~seen).sum()) <= 1


def test_queries_for_which_nothing_lives_get_zero_and_no_gradient():
    """More queries than a decode step has, all of them after the death of every memory."""
    q = torch.randn(2, 2, 40, 8, requires_grad=True)
    k, span = torch.randn(2, 2, 5, 8, requires_grad=True), torch.zeros(2, 5, requires_grad=True)
    y = expire_attention(q, k, k, span, torch.arange(40) + 1000, torch.arange(5), ramp=3, impl="chunked")
    grads = torch.autograd.grad(y.sum(), (q, k, span))
    assert not any(bool(t.any()) for t in (y, *grads))


@pytest.mark.parametrize("count", [4096, pytest.param(16384, marks=pytest.mark.long)])
def test_a_retrofitted_model_reads_packed_documents_as_it_reads_each_alone(count):
    """Position ids that begin anew tell it where documents begin."""
    model, ids = tiny().double(), tokens(1, count)
    forgetful(model)
    bounds = cut(count, count // 128, 6)
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)]).unsqueeze(0)
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False).logits
        for a, b in pairwise(bounds):
            if b > a:
                alone = model(ids[:, a:b], use_cache=False).logits
                torch.testing.assert_close(packed[:, a:b], alone, rtol=0, atol=DOUBLE * float(alone.abs().max()))
