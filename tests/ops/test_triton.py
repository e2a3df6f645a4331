"""The fused kernels against the definition: in Triton's interpreter on the CPU, and as they are where there is a GPU."""

from itertools import pairwise

import pytest
import torch

from expire_span.ops import expire_attention
from tests.error_budget import assert_all_within_budget
from tests.error_budget import assert_within_budget as within_budget
from tests.operator_cases import GRADS, LEAVES, Case, as_dtype
from tests.triton_interpreter import DEVICE, ON_GPU, PAPER, SMALL, small_tiles, tuning

Launch, Tuning = tuning.Launch, tuning.Tuning

pytestmark = [pytest.mark.usefixtures(small_tiles.__name__), *([pytest.mark.gpu] if ON_GPU else [])]

FACTOR = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
"""How much larger our error may be than that of the definition computed in the same dtype."""

CASES = {
    "one query": Case(queries=1),
    "one query in a store": Case(queries=1, stored=50, gaps=True),
    "63": Case(),
    "a store, gaps": Case(queries=50, stored=40, gaps=True),
    "all alive": Case(queries=70, spans="alive"),
    "born on the ramp": Case(queries=111, stored=20, spans="short"),
    "born on the ramp, no self": Case(queries=45, spans="short", gaps=True, options=PAPER),
    "all expired": Case(queries=35, spans="expired"),
    "one survivor per block": Case(queries=70, spans="scattered"),
    "ramp edges": Case(queries=45, stored=20, spans="edges"),
    "a million steps in": Case(queries=63, start=10**6, gaps=True),
    "a billion steps in": Case(queries=35, start=10**9),
    "spans per head": Case(batch=1, queries=35, per_head=True, heads=4, kv_heads=2),
    "two heads share spans": Case(batch=2, queries=24, span_rows=2, heads=3, kv_heads=3, gaps=True),
    "no self": Case(queries=63, options={"include_self": False}),
    "many rows": Case(batch=3, queries=20, stored=11, heads=2, kv_heads=2),
    "head dim 64": Case(queries=33, dim=64),
    "head dim 96": Case(queries=33, dim=96),
    "head dim 128": Case(queries=17, dim=128),
    "head dim 256": Case(queries=17, dim=256),
    "relative": Case(queries=45, stored=20, gaps=True, relative=12, options={"normalizer_eps": 0.1}),
    "relative, one query": Case(queries=1, stored=9, relative=8, options=PAPER),
    "relative beyond the row, per head": Case(1, 4, 2, 24, per_head=True, relative=100, options=PAPER),
    "relative, a million steps in": Case(queries=33, dim=64, start=10**6, relative=5),
    "eps": Case(queries=35, stored=20, spans="edges", options={"normalizer_eps": 0.1}),
    "eps, all expired": Case(queries=20, spans="expired", options=PAPER),
    "soft caps": Case(queries=45, stored=20, spans="edges", options={"softcap": 1.5}),
    "soft caps and sinks": Case(1, 2, 1, queries=24, gaps=True, sinks=True, options={"softcap": 3.0}),
    "sinks": Case(queries=33, spans="scattered", sinks=True),
    "sinks, all expired": Case(queries=20, spans="short", sinks=True, options={"include_self": False}),
}
LONG = {
    "1000": Case(batch=2, heads=4, kv_heads=2, queries=1000, stored=111, dim=64),
    "1000, scattered": Case(batch=2, heads=4, kv_heads=2, queries=1000, spans="scattered", dim=64, gaps=True),
    "1000, alive": Case(batch=2, heads=4, kv_heads=4, queries=1000, spans="alive", dim=128),
    "1000, per head": Case(batch=2, heads=4, kv_heads=2, queries=1000, spans="mixed", per_head=True, dim=96),
    "1000, some share": Case(batch=2, heads=8, kv_heads=8, queries=1000, spans="mixed", span_rows=3, dim=64),
    "1000, wide heads": Case(batch=1, heads=2, kv_heads=2, queries=1000, dim=256),
    "1000, narrow heads": Case(batch=1, heads=2, kv_heads=1, queries=1000, dim=32, start=10**6),
    "1000, relative": Case(batch=2, heads=4, kv_heads=2, queries=1000, stored=300, dim=64, relative=256, options=PAPER),
    "1000, relative, alive": Case(1, 4, 4, 1000, spans="alive", dim=128, gaps=True, relative=111, options=PAPER),
    "1000, born on the ramp": Case(batch=2, heads=8, kv_heads=8, queries=1000, spans="short", per_head=True, dim=64),
    "1000, soft caps": Case(batch=2, heads=4, kv_heads=2, queries=1000, stored=111, dim=64, options={"softcap": 5.0}),
    "1000, sinks": Case(batch=2, heads=8, kv_heads=2, queries=1000, dim=64, per_head=True, gaps=True, sinks=True),
    "1000, eps": Case(batch=2, heads=4, kv_heads=2, queries=1000, dim=64, options={"normalizer_eps": 0.1}),
    "111, relative beyond the row": Case(3, 4, 4, 111, stored=63, dim=32, relative=512, options=PAPER),
}
for case in CASES.values():
    case.dim = 32 if case.dim == 16 else case.dim
    if (case.batch, case.heads) == (2, 4) and not case.per_head:
        case.batch, case.heads, case.kv_heads = 1, 2, 1


def run(case: Case, impl: str, dtype=torch.float64, ramp=7.0, device="cpu", **options) -> dict[str, torch.Tensor]:
    """The output and every gradient, on the CPU."""
    inputs = {n: x.detach().to(device) for n, x in case.tensors(dtype).items()}
    names = [n for n in LEAVES if n in inputs]
    inputs |= {n: inputs[n].requires_grad_() for n in names}
    inputs["span"] = inputs["span"].detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    y = expire_attention(**inputs, ramp=ramp, impl=impl, **case.options, **options)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    grads = torch.autograd.grad(y, [inputs[n] for n in names], direction)
    named = {"y": y, **{f"d{n}": g for n, g in zip(names, grads)}}
    return {n: x.detach().cpu() for n, x in named.items()}


def assert_within_budget(case: Case, dtype: torch.dtype, ramp: float = 7.0, **options) -> None:
    """Our error against float64, on the same rounded inputs, is within a factor of the definition's in that dtype."""
    exact, coarse = run(_Rounded(case, dtype), "reference", ramp=ramp), run(case, "reference", dtype, ramp)
    got = run(case, "triton", dtype, ramp, DEVICE, **options)
    assert_all_within_budget(got, exact, coarse, FACTOR[dtype])


class _Rounded:
    """A case whose float64 inputs hold exactly the values that `dtype` holds (spans: float32)."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype, self.options = case, dtype, case.options

    def tensors(self, _dtype) -> dict[str, torch.Tensor]:
        kept = self.case.tensors(self.dtype)
        return {n: x.detach().double() if x.is_floating_point() else x for n, x in kept.items()}


SEEN_ELSEWHERE = {
    "63",
    "a store, gaps",
    "all alive",
    "one survivor per block",
    "born on the ramp",
    "a million steps in",
    "no self",
    "many rows",
    "head dim 64",
    "eps, all expired",
    "soft caps",
    "sinks",
}
"""Cases that other tiles or another case of this table try too: in the interpreter they are among the long tests."""


def in_the_interpreter_long(names):
    """All cases on a GPU."""
    return [pytest.param(n, marks=pytest.mark.long) if n in SEEN_ELSEWHERE and not ON_GPU else n for n in names]


@pytest.mark.parametrize("name", in_the_interpreter_long(CASES))
def test_every_gradient_against_float64(name):
    assert_within_budget(CASES[name], torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="too long for the interpreter")
@pytest.mark.parametrize("dtype", FACTOR, ids=str)
@pytest.mark.parametrize("name", LONG)
def test_long_rows_against_float64(name, dtype):
    assert_within_budget(LONG[name], dtype, ramp=16.0)
    assert_within_budget(LONG[name], dtype, ramp=16.0, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("paper", [False, True])
def test_half_precision(dtype, paper):
    extra = dict(relative=10, options=PAPER) if paper else {}
    assert_within_budget(Case(1, 2, 1, 33, 34, 32, gaps=True, **extra), dtype)


@pytest.mark.parametrize(
    "name", [pytest.param("63", marks=pytest.mark.long), "a store, gaps", "all alive", "one survivor per block"]
)
@pytest.mark.parametrize(
    "options", [dict(wide=2, split_at=16), pytest.param(dict(split_at=32), marks=pytest.mark.long)], ids=str
)
def test_long_lives_shared_and_tiles_taken_in_pairs(name, options):
    """Tiles of several classes in one program, some of them dead; query tiles half as large as the forward pass's."""
    block_n, m = (64, 64) if ON_GPU else (16, 16)
    tuning.override(Tuning(block_n, Launch(2 * m), Launch(m), Launch(m), **options))
    try:
        assert_within_budget(CASES[name], torch.float32)
    finally:
        tuning.override(None if ON_GPU else SMALL)


def test_descriptors_read_what_pointers_read():
    case = Case(1, 1, 1, 35, 20, 96, gaps=True)
    before = tuning.choose(96, torch.float32)
    results = []
    for tma in (False, True):
        tuning.override(Tuning(before.block_n, before.forward, before.dq, before.dkv, tma=tma))
        results.append(run(case, "triton", torch.float32, device=DEVICE))
    tuning.override(None if ON_GPU else SMALL)
    exact, coarse = run(_Rounded(case, torch.float32), "reference"), run(case, "reference", torch.float32)
    for got in results:
        assert_all_within_budget(got, exact, coarse)


@pytest.mark.parametrize("options", [dict(wide=2, split_at=16), dict(tma=True)], ids=str)
def test_relative_keys_whatever_the_block_sizes(options):
    """Tiles that are old enough need no table, in every kernel."""
    block_n, m = (64, 64) if ON_GPU else (16, 16)
    tuning.override(Tuning(block_n, Launch(2 * m), Launch(m), Launch(m), **options))
    try:
        assert_within_budget(Case(1, 2, 1, 35, 14, 32, spans="alive", relative=17, options=PAPER), torch.float32)
    finally:
        tuning.override(None if ON_GPU else SMALL)


def test_two_memories_of_one_position_and_relative_keys():
    x = {n: t.to(DEVICE) for n, t in Case(1, 2, 1, 20, 5, 32, relative=8).tensors(torch.float32).items()}
    x |= {"k_pos": x["k_pos"].clone()}
    x["k_pos"][7] = x["k_pos"][6]
    with pytest.raises(ValueError, match=r"at different positions, got two at 7; number them"):
        expire_attention(**x, ramp=7.0, impl="triton", check_values=True)
    x["k_pos"][:8] = -(2**40)  # as far away as padding
    assert expire_attention(**x, ramp=7.0, impl="triton", check_values=True).isfinite().all()


@pytest.mark.parametrize("ramp", [0.5, 1.0, 49.0])
def test_ramps(ramp):
    assert_within_budget(Case(1, 1, 1, 45, 20, 32, spans="edges"), torch.float32, ramp)


def test_uninitialised_memory_is_never_read(monkeypatch):
    """Every buffer starts as NaN, or as an index far outside."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        assert_within_budget(Case(1, 1, 1, 45, 20, 32, gaps=True), torch.float32)
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_slots_in_front_are_dead():
    """Rows of a store of different lengths: padding stands in front, at position -2**40 with span 0."""
    case = Case(2, 2, 1, 17, 40, 32)
    x = {n: t.detach() for n, t in case.tensors(torch.float32).items()}
    x["k_pos"] = x["k_pos"].repeat(2, 1)
    for row, pads in enumerate((3, 37)):
        x["k_pos"][row, :pads], x["span"][row, :pads] = -(2**40), 0.0
        x["k"][row, :, :pads], x["v"][row, :, :pads] = 1e4, 1e4
    exact, coarse = (expire_attention(**as_dtype(x, d), ramp=7.0) for d in (torch.float64, torch.float32))
    x = {n: t.to(DEVICE) for n, t in x.items()}
    for grad in (True, False):  # the kernel that trains, and the one that decodes (few queries)
        q = x["q"][:, :, -8:].clone().requires_grad_(grad)
        y = expire_attention(**{**x, "q": q, "q_pos": x["q_pos"][-8:]}, ramp=7.0, impl="triton")
        within_budget(y.cpu(), exact[:, :, -8:], coarse[:, :, -8:])


DECODE = {
    "one query": Case(2, 4, 2, 1, 111, 32, gaps=True),
    "per head, far": Case(2, 4, 2, 5, 300, 32, per_head=True, spans="scattered", start=10**9),
    "edges, no self": Case(1, 4, 1, 16, 30, 64, spans="edges", options={"include_self": False}),
    "expired": Case(1, 2, 1, 3, 30, 96, spans="expired"),
    "born on the ramp": Case(2, 4, 2, 3, 30, 32, spans="short"),
    "several splits": Case(1, 1, 1, 1, 900, 32, spans="mixed"),
    "relative": Case(2, 4, 2, 3, 111, 32, gaps=True, relative=40, options=PAPER),
    "eps": Case(1, 2, 1, 1, 900, 32, spans="edges", options={"normalizer_eps": 0.1}),
    "soft caps and sinks": Case(2, 4, 2, 3, 200, 32, gaps=True, sinks=True, options={"softcap": 3.0}),
    "sinks, expired": Case(1, 2, 1, 3, 30, 32, spans="expired", sinks=True, options={"include_self": False}),
}


@pytest.mark.parametrize("name", DECODE)
def test_decoding(name):
    case = DECODE[name]
    x = as_dtype(case.tensors(torch.float32), torch.float32)
    exact, coarse = (
        expire_attention(**as_dtype(x, d), ramp=7.0, impl="reference", **case.options)
        for d in (torch.float64, torch.float32)
    )
    x = {n: t.to(DEVICE) for n, t in x.items()}
    y = expire_attention(**x, ramp=7.0, impl="triton", **case.options)
    within_budget(y.cpu(), exact, coarse)


def test_scores_beyond_the_range_of_float16():
    """Products of 1e5 and more, where a score held in float16 would be infinite."""
    case = Case(1, 1, 1, 40, 20, 32)
    x = {n: t.detach() for n, t in case.tensors(torch.float16).items()}
    x["span"] = x["span"].float()
    x["q"], x["k"] = x["q"] * 200, x["k"] * 200
    exact, coarse = (expire_attention(**x | as_dtype(x, d), ramp=7.0) for d in (torch.float64, torch.float32))
    coarse = coarse.half()  # scores in float32, as no float16 could hold them, and an output in float16
    x = {n: t.to(DEVICE).requires_grad_(n in GRADS) for n, t in x.items()}
    y = expire_attention(**x, ramp=7.0, impl="triton")
    within_budget(y.cpu(), exact, coarse)
    grads = torch.autograd.grad(y.float().square().sum(), [x[n] for n in GRADS])
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize("impl", ["reference", "chunked", "triton"])
def test_documents_do_not_see_each_other(impl):
    """Packed, each document gets what it gets alone: output and gradients."""
    lengths = [5, 40, 1, 17]
    case = Case(1, 2, 1, sum(lengths), 0, 32, spans="alive" if impl != "reference" else "mixed", relative=9)
    names = (*GRADS, "relative_keys")
    dtype = torch.float32 if impl == "triton" else torch.float64
    device = DEVICE if impl == "triton" else "cpu"
    x = {n: t.detach().to(device).requires_grad_(n in names) for n, t in case.tensors(dtype).items()}
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0)
    y = expire_attention(**x, ramp=7.0, impl=impl, cu_seqlens=bounds)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths)).to(device)
    torch.testing.assert_close(expire_attention(**x, ramp=7.0, impl=impl, documents=(ids, ids[None])), y)
    grads = torch.autograd.grad(y.square().sum(), [x[n] for n in names])
    got = dict(zip(("y", *names), (t.detach().cpu() for t in (y, *grads))))
    x = {n: t.cpu() for n, t in x.items()}
    alone = [_documents_alone(as_dtype(x, d), names, bounds) for d in (torch.float64, torch.float32)]
    assert_all_within_budget(got, *alone)


def _documents_alone(x: dict[str, torch.Tensor], names: tuple[str, ...], bounds) -> dict[str, torch.Tensor]:
    """The definition of each document by itself: outputs one behind the other, and the gradients of their squares."""
    x |= {n: x[n].requires_grad_() for n in names}
    y = torch.cat([_one_document(x, slice(int(a), int(b))) for a, b in pairwise(bounds)], 2)
    return {"y": y.detach()} | dict(zip(names, torch.autograd.grad(y.square().sum(), [x[n] for n in names])))


def test_documents_with_tiles_taken_in_pairs():
    """Beside the last living tile a pair may hold a dead one, whose memories no query of any document sees."""
    x = {n: t.detach().to(DEVICE) for n, t in Case(1, 2, 1, 90, 0, 32, spans="mixed").tensors(torch.float32).items()}
    x["span"][:, ::3] = -8.0  # never seen
    ids = torch.arange(90, device=DEVICE) // 31
    block_n, m = (64, 64) if ON_GPU else (16, 16)
    options = dict(documents=(ids, ids[None]), check_values=False)
    exact, coarse = (_squares(as_dtype(x, d), "reference", **options) for d in (torch.float64, torch.float32))
    for wide in (1, 2):
        tuning.override(Tuning(block_n, Launch(2 * m), Launch(m), Launch(m), wide=wide))
        try:
            assert_all_within_budget(_squares(x, "triton", **options), exact, coarse)
        finally:
            tuning.override(None if ON_GPU else SMALL)


def _squares(x: dict[str, torch.Tensor], impl: str, **options) -> dict[str, torch.Tensor]:
    """The output, and the gradients of the sum of its squares."""
    x = {n: t.detach().requires_grad_(n in GRADS) for n, t in x.items()}
    y = expire_attention(**x, ramp=7.0, impl=impl, **options)
    grads = torch.autograd.grad(y.square().sum(), [x[n] for n in GRADS])
    return {n: t.detach().cpu() for n, t in zip(("y", *GRADS), (y, *grads))}


def _assert_same_squares(x: dict[str, torch.Tensor], **options) -> None:
    """The kernels' output and gradients against the definition's."""
    exact, coarse = (_squares(as_dtype(x, d), "reference", **options) for d in (torch.float64, torch.float32))
    assert_all_within_budget(_squares(x, "triton", **options), exact, coarse)


def _one_document(x: dict[str, torch.Tensor], part: slice) -> torch.Tensor:
    pieces = {n: x[n][:, :, part] for n in ("q", "k", "v")}
    where = {"span": x["span"][:, part], "q_pos": x["q_pos"][part], "k_pos": x["k_pos"][part]}
    return expire_attention(**pieces, **where, ramp=7.0, relative_keys=x["relative_keys"], impl="reference")


@pytest.mark.parametrize("per_head", ["span", "k_pos"])
def test_spans_or_positions_per_head_beside_shared_ones(per_head):
    x = Case(2, 2, 2, 20, 5, 32).tensors(torch.float32)
    x = {n: t.detach().to(DEVICE) for n, t in x.items()}
    x["k_pos"] = x["k_pos"].expand(2, 2, -1) if per_head == "k_pos" else x["k_pos"]
    x["span"] = x["span"].unsqueeze(1) * torch.ones(2, 1, device=DEVICE) if per_head == "span" else x["span"]
    _assert_same_squares(x)


def test_strided_inputs_and_gradients():
    """Heads split off by a transpose, an expanded output gradient, a negative scale."""
    case = Case(1, 2, 2, 40, 0, 32)
    x = case.tensors(torch.float32)
    for name in ("q", "k", "v"):
        x[name] = x[name].detach().transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE).requires_grad_()
    x |= {n: x[n].detach().to(DEVICE).requires_grad_(n == "span") for n in ("span", "q_pos", "k_pos")}

    def sums(x, impl):
        x = {n: t.detach().requires_grad_(n in GRADS) for n, t in x.items()}  # strides stay as they are
        y = expire_attention(**x, ramp=7.0, impl=impl, scale=-0.2)
        grads = torch.autograd.grad(y.sum(), [x[n] for n in GRADS])
        return {n: t.detach().cpu() for n, t in zip(("y", *GRADS), (y, *grads))}

    exact, coarse = (sums(as_dtype(x, d), "reference") for d in (torch.float64, torch.float32))
    assert_all_within_budget(sums(x, "triton"), exact, coarse)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_deterministic_gradients_repeat_bit_for_bit():
    first, second = (run(LONG["1000"], "triton", torch.bfloat16, device=DEVICE, deterministic=True) for _ in range(2))
    for name, want in first.items():
        assert torch.equal(second[name], want), name


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_more_than_two_to_the_31_elements():
    heads, queries, dim = 33, 2**20, 64
    shape = (1, heads, queries, dim)
    q, k, v = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    span, pos = torch.full((1, queries), 20.0, device=DEVICE), torch.arange(queries, device=DEVICE)
    whole = expire_attention(q, k, v, span, pos, pos, ramp=8.0, impl="triton")
    alone = expire_attention(*(x[:, -1:].clone() for x in (q, k, v)), span, pos, pos, ramp=8.0, impl="triton")
    torch.testing.assert_close(whole[:, -1:], alone)
