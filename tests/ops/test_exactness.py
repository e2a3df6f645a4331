"""Exactness in every dtype and implementation: deleting a dead memory, whatever it holds, changes no output and no gradient."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from expire_span import ExpiringMemory
from expire_span.ops import attend_in_segments, expire_attention
from expire_span.ops.inputs import lifetime_dtype
from expire_span.ops.rule import is_alive, lifetime, steps_left
from expire_span.store.slots import Slots
from tests.error_budget import assert_all_within_budget, assert_within_budget
from tests.operator_cases import GRADS
from tests.triton_interpreter import DEVICE, ON_GPU, small_tiles

pytestmark = [pytest.mark.usefixtures(small_tiles.__name__), *([pytest.mark.gpu] if ON_GPU else [])]

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLAIN = ["reference", "chunked", "decode"]
"""`decode` stands for the path of a few queries without gradients."""
SHORT, LONG = 40, 1000
"""Random cases for each dtype and implementation in `make test` and in `make test-long`."""


@dataclass
class Deletion:
    """A random problem, the memories that are alive at its first query, and NaN or infinity in all others."""

    x: dict[str, Tensor]
    ramp: float
    alive: Tensor

    @classmethod
    def draw(cls, seed: int, dtype: torch.dtype, dim: int) -> "Deletion":
        g = torch.Generator().manual_seed(seed)

        def pick(*values):
            return values[int(torch.randint(len(values), (), generator=g))]

        ramp, queries, stored = pick(0.5, 1.0, 3.0, 7.3, 64.0), pick(1, 2, 5, 9), pick(1, 7, 30, 50)
        heads, per_head, total = pick(1, 2), pick(False, True), stored + queries
        longest = pick(5.0, 100.0, 300.0, 4000.0)  # float16 counts single steps up to 2048, bfloat16 up to 256
        span = torch.rand((1, heads, total) if per_head else (1, total), generator=g) * (longest + ramp) - ramp
        span = pick(span, span.round(), (span * 64).round() / 64).clamp_min(-ramp)
        gap = max(2, int(2 * longest / total))
        pos = torch.randint(1, gap + 1, (total,), generator=g).cumsum(0) + pick(0, 10**6)
        x = {
            "q": torch.randn(1, 2 * heads, queries, dim, generator=g).to(dtype),
            "k": torch.randn(1, heads, total, dim, generator=g).to(dtype),
            "v": torch.randn(1, heads, total, dim, generator=g).to(dtype),
            "span": span.to(dtype).clamp_min(-ramp),
            "q_pos": pos[stored:].to(pick(torch.int64, torch.int32)),
            "k_pos": pos.to(pick(torch.int64, torch.int32)),
        }
        lifetime = x["span"].to(lifetime_dtype(x["span"], x["q"]))
        age = (x["q_pos"][0] - x["k_pos"]).to(lifetime.dtype)
        alive = (lifetime - age > -ramp).reshape(-1, total).any(0)
        for name in ("k", "v"):
            x[name][:, :, ~alive] = pick(torch.nan, torch.inf, -torch.inf, 1.0)
        return cls(x, ramp, alive)

    def deleted(self) -> dict[str, Tensor]:
        kept = {n: self.x[n][:, :, self.alive] for n in ("k", "v")}
        return self.x | kept | {n: self.x[n][..., self.alive] for n in ("span", "k_pos")}

    def definition(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The definition of what is left, computed in `dtype`, with lifetimes in the digits that the case has."""
        x = self.deleted()
        lifetimes = x["span"].to(lifetime_dtype(x["span"], x["q"]))
        return run(x | {n: x[n].to(dtype) for n in "qkv"} | {"span": lifetimes}, self.ramp, "reference")

    def without_dead(self, got: dict[str, Tensor]) -> dict[str, Tensor]:
        """Outputs and gradients of the living; the dead must have no gradient."""
        for name in got.keys() & {"k", "v", "span"}:
            dim = -1 if name == "span" else -2
            assert not bool(got[name].index_select(dim, (~self.alive).nonzero()[:, 0]).any()), f"gradient of {name}"
            got = got | {name: got[name].index_select(dim, self.alive.nonzero()[:, 0])}
        return got

    def span_terms(self) -> Tensor:
        """The sum of the sizes of the terms of every span's gradient, from float64.

        A fading memory of weight m has the gradient `exp(s) / sum(m exp(s)) (g . v - g . y) / ramp`: where it is the only one
        that a query sees, the two products cancel after they were divided by m.
        """
        x = self.deleted()
        q, k, v = (x[n].double() for n in "qkv")
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        age = (x["q_pos"].long()[:, None] - x["k_pos"].long()).double()
        span = x["span"].double() if x["span"].dim() == 3 else x["span"].double()[:, None]
        mask = (1 + (span[:, :, None] - age) / self.ramp).clamp(0, 1) * (age >= 0)  # [1, P, T, S]
        on_ramp = ((mask > 0) & (mask < 1)).repeat_interleave(q.shape[1] // mask.shape[1], 1)
        mask = mask.repeat_interleave(q.shape[1] // mask.shape[1], 1)
        scores = torch.softmax((q @ k.mT / q.shape[-1] ** 0.5).masked_fill(mask == 0, -torch.inf), -1).nan_to_num()
        share = scores / (scores * mask).sum(-1, keepdim=True).clamp_min(1e-300)
        g = direction_of(q)
        cancel = (g @ v.mT).abs() + (g * ((share * mask) @ v)).sum(-1, keepdim=True).abs()
        terms = (share * cancel * on_ramp).sum(2) / self.ramp  # [1, Hq, S]
        return terms.unflatten(1, (span.shape[1], -1)).sum(2).reshape(x["span"].shape)


def direction_of(y: Tensor) -> Tensor:
    """The projection of outputs whose gradient is taken."""
    return (torch.randn(y.shape, generator=torch.Generator().manual_seed(1)) / y.shape[-1] ** 0.5).to(y)


def run(x: dict[str, Tensor], ramp: float, impl: str) -> dict[str, Tensor]:
    """The output, and unless `impl` decodes, the gradients of a random projection of it."""
    learns, device = not impl.endswith("decode"), DEVICE if impl.startswith("triton") else "cpu"
    x = {n: t.detach().to(device).requires_grad_(learns and n in GRADS) for n, t in x.items()}
    chosen = {"decode": "chunked", "triton decode": "triton"}.get(impl, impl)
    y = expire_attention(**x, ramp=ramp, impl=chosen)
    if not learns:
        return {"y": y.cpu()}
    grads = torch.autograd.grad(y, [x[n] for n in GRADS], direction_of(y))
    return {n: t.detach().cpu() for n, t in zip(("y", *GRADS), (y, *grads))}


def assert_deletion_changes_nothing(seed: int, dtype: torch.dtype, impl: str, dim: int = 8) -> None:
    case = Deletion.draw(seed, dtype, dim)
    exact = case.definition(torch.float64)
    rounded = case.definition(torch.float32 if dtype == torch.float64 else dtype)
    terms = {"span": case.span_terms()}
    for got in (case.without_dead(run(case.x, case.ramp, impl)), run(case.deleted(), case.ramp, impl)):
        assert_all_within_budget(got, {n: exact[n] for n in got}, {n: rounded[n] for n in got}, terms=terms)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", PLAIN)
def test_deletion_changes_nothing(impl, dtype):
    for seed in range(SHORT):
        assert_deletion_changes_nothing(seed, dtype, impl)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_deletion_changes_nothing_in_the_kernels(dtype):
    assert_deletion_changes_nothing(2, dtype, "triton", dim=32)
    for seed in range(40 if ON_GPU else 3):
        assert_deletion_changes_nothing(seed, dtype, "triton decode", dim=32)


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", [*PLAIN, "triton", "triton decode"])
def test_deletion_changes_nothing_in_a_thousand_cases(impl, dtype):
    kernels = impl.startswith("triton")
    if kernels and dtype == torch.float64:
        pytest.skip("the kernels do not serve float64")
    few = impl == "triton" and not ON_GPU  # interpreted, a case takes seconds
    for seed in range(LONG // 10 if few else LONG):
        assert_deletion_changes_nothing(seed, dtype, impl, dim=32 if kernels else 8)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_rows_in_segments_hold_what_a_rectangle_holds(dtype):
    """Rows of 3 and 20 memories in flat buffers, with NaN in the slots that belong to no row."""
    g = torch.Generator().manual_seed(0)
    counts, starts, heads, dim = torch.tensor([3, 20]), torch.tensor([1, 9]), 2, 32
    k, v = (torch.full((40, heads, dim), torch.nan, dtype=dtype) for _ in range(2))
    span, k_pos = torch.zeros(40, dtype=dtype), torch.full((40,), -(2**40))
    q, q_pos = torch.randn(2, 2 * heads, 2, dim, generator=g).to(dtype), torch.tensor([3000, 3001])
    rows = []
    for start, count in zip(starts.tolist(), counts.tolist()):
        part = slice(start, start + count)
        k[part], v[part] = (torch.randn(count, heads, dim, generator=g).to(dtype) for _ in range(2))
        span[part] = (torch.rand(count, generator=g) * 3000).to(dtype)
        k_pos[part] = torch.randint(0, 3001, (count,), generator=g).sort().values
        rows.append(
            {
                "k": k[part].transpose(0, 1)[None],
                "v": v[part].transpose(0, 1)[None],
                "span": span[part][None],
                "k_pos": k_pos[part],
            }
        )
    flat = [t.to(DEVICE) for t in (q, k, v, span, q_pos, k_pos)]
    y = attend_in_segments(*flat, (starts.to(DEVICE), counts.to(DEVICE), 0, 20), ramp=7.0).cpu()
    for n, row in enumerate(rows):
        alone = {"q": q[n : n + 1], "q_pos": q_pos, **row}
        wide = alone | {name: alone[name].double() for name in "qkv"} | {"span": alone["span"].float()}
        exact, rounded = (expire_attention(**x, ramp=7.0, impl="reference") for x in (wide, alone))
        assert_within_budget(y[n : n + 1], exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_store_deletes_nothing_that_the_operator_still_sees(dtype):
    """Spans, keys and values all in the dtype of the model: the store keeps lifetimes with all their digits."""
    for seed in range(SHORT):
        case = Deletion.draw(seed, dtype, 8)
        x, heads = case.x, case.x["k"].shape[1]
        lifetimes = x["span"].reshape(1, -1, x["span"].shape[-1])
        memory = ExpiringMemory.empty((1, heads), ramp=case.ramp)
        memory = memory.append(x["k_pos"].long(), lifetimes.expand(1, heads, -1), k=x["k"], v=x["v"])
        memory = memory.expire(int(x["q_pos"][0])).compact()
        kept = {"k": memory["k"], "v": memory["v"], "span": memory.span, "k_pos": memory.pos}
        got = run(x | kept, case.ramp, "decode")
        exact = case.definition(torch.float64)
        rounded = case.definition(torch.float32 if dtype == torch.float64 else dtype)
        assert_within_budget(got["y"], exact["y"], rounded["y"])


def test_a_store_compares_wide_spans_in_the_digits_of_the_operator():
    """Float64 spans of float32 keys: the operator compares them in float32, where other memories are dead than in float64."""
    ramp, age = 8.001, torch.arange(1, 120)
    ones, rows = torch.ones(119, 1, 1, 8), torch.arange(119)
    for dtype in (torch.float32, torch.float64):
        x, span = ones.to(dtype), (age.double() - ramp - 1e-12).view(119, 1)  # dead in float64, all of them
        born = torch.zeros(119, 1, dtype=torch.long)
        y = expire_attention(x, x, x, span, age.view(119, 1), born, ramp=ramp)
        memory = ExpiringMemory.empty(119, ramp=ramp).append(torch.tensor([0]), span, k=x[:, 0])
        kept = torch.tensor([int(memory.select(rows[n : n + 1]).live(int(age[n]))) for n in rows])
        seen = y[:, 0, 0, 0] != 0
        assert bool((seen <= kept.bool()).all()) and bool(seen.any()) == (dtype == torch.float32)


@pytest.mark.parametrize("impl", ["reference", "chunked", "decode"])
@pytest.mark.parametrize("what", ["future", "padding", "ramp edge"])
def test_memories_that_no_query_sees_may_hold_anything(impl, what):
    """Not yet born, an empty slot of a store, or dead at exactly the first query; also where rows differ in what they see."""
    g = torch.Generator().manual_seed(0)
    x = {n: torch.randn(2, 1, t, 8, generator=g) for n, t in (("q", 3), ("k", 9), ("v", 9))}
    x |= {"span": torch.full((2, 9), 4.0), "q_pos": torch.arange(8, 11), "k_pos": torch.arange(9).repeat(2, 1)}
    clean = run(x, 3.0, impl)
    row, place = 1, 8 if what == "future" else 0 if what == "padding" else 1
    x["k_pos"][row, place] = {"future": 11, "padding": -(2**40), "ramp edge": 1}[what]
    without = {n: t.clone() for n, t in x.items()}
    for name in ("k", "v"):
        x[name][row, :, place] = torch.nan
        without[name][row, :, place] = 0
    got, want = run(x, 3.0, impl), run(without, 3.0, impl)
    assert all(bool(t.isfinite().all()) for t in got.values())
    for name, t in want.items():
        torch.testing.assert_close(got[name], t)
        torch.testing.assert_close(got[name][0], clean[name][0])


EVERY_IMPL = pytest.mark.parametrize("impl", ["reference", "chunked", "decode", "triton", "triton decode"])


@EVERY_IMPL
@pytest.mark.parametrize("ramp", [49.0, 100.0])
def test_rounding_shows_no_memory_that_a_store_deletes(impl, ramp):
    """Lone memories that the rule calls dead by a hair; in float32, 49 times 1 / 49 is less than 1."""
    g = torch.Generator().manual_seed(0)
    age = torch.randint(int(ramp), 5000, (20000,), generator=g)
    span = (age - ramp) * (1 + torch.randint(-3, 4, age.shape, generator=g) * torch.finfo(torch.float32).eps)
    risky = (steps_left(span, -age, 0, ramp) <= 0) & (span - age >= -ramp)
    rows = 1 if impl == "triton" else 8  # its interpreter takes a second for each
    span, age = (x[risky][:rows].unsqueeze(1).to(DEVICE) for x in (span, age))
    ones = torch.ones(rows, 1, 1, 32, device=DEVICE)
    name = {"decode": "chunked", "triton decode": "triton"}.get(impl, impl)
    span.requires_grad_("decode" not in impl)
    y = expire_attention(ones, ones, ones, span, age, torch.zeros_like(age), ramp=ramp, impl=name)
    assert not bool(y.any())


@EVERY_IMPL
@pytest.mark.parametrize(("ramp", "span"), [(1e-6, 100.0), (1e-5, 100.0), (0.1, 1e6), (0.5, 2.0**24)])
def test_full_weight_at_the_age_of_the_span(impl, ramp, span):
    """However short the ramp: two memories of one key, one as old as its span, count the same, and neither is on its ramp."""
    q, k = torch.ones(1, 1, 1, 32, device=DEVICE), torch.ones(1, 1, 2, 32, device=DEVICE)
    v = torch.tensor([1.0, 3.0], device=DEVICE).view(1, 1, 2, 1).expand_as(k)
    spans = torch.tensor([[span, 1e9]], device=DEVICE, requires_grad="decode" not in impl)
    name = {"decode": "chunked", "triton decode": "triton"}.get(impl, impl)
    for late, wanted in ((0, 2.0), (1, 3.0)):
        if span + late <= 2**24:  # float32 holds no later ages exactly
            pos = torch.tensor([0, int(span) + late], device=DEVICE)
            y = expire_attention(q, k, v, spans, pos[1:], pos, ramp=ramp, impl=name)
            assert (y == wanted).all()
            if spans.requires_grad:
                assert not torch.autograd.grad(y.sum(), spans)[0].any()


@EVERY_IMPL
@pytest.mark.parametrize("ramp", [1e-6, 2.0**-20, 1e-4, 2.0**-7])
def test_half_weight_in_the_middle_of_the_shortest_ramp(impl, ramp):
    """A query's own memory counts half, beside one that counts fully, wherever in a tile they lie."""
    count = 1 if "decode" in impl else 33
    ones = torch.ones(1, 1, count + 1, 32, device=DEVICE)
    v = torch.cat([torch.zeros_like(ones[:, :, :1]), ones[:, :, 1:]], 2)  # the first is seen by all
    spans = torch.full((1, count + 1), -ramp / 2, device=DEVICE)
    spans[:, 0] = 1e9
    spans.requires_grad_("decode" not in impl)
    name = {"decode": "chunked", "triton decode": "triton"}.get(impl, impl)
    pos = torch.arange(100, 101 + count, device=DEVICE)
    y = expire_attention(ones[:, :, 1:], ones, v, spans, pos[1:], pos, ramp=ramp, impl=name)
    torch.testing.assert_close(y, torch.full_like(y, 1 / 3), rtol=1e-5, atol=0)
    if spans.requires_grad:  # of m / (1 + m) for each of 32 numbers, at m = 1/2
        (grad,) = torch.autograd.grad(y.sum(), spans)
        torch.testing.assert_close(grad[:, 1:], torch.full_like(grad[:, 1:], 32 / 1.5**2 / ramp), rtol=1e-4, atol=0)


def test_stores_keep_memories_to_the_end_of_their_span():
    for ramp, span in ((1e-6, 100.0), (0.1, 1e6)):
        memory = ExpiringMemory.empty(1, ramp=ramp).append(
            torch.tensor([0]), torch.tensor([[span]]), k=torch.ones(1, 1)
        )
        slots, one, where = (
            Slots(1, 1, [64], ramp=ramp),
            torch.ones(1, 1, 1, 1),
            (memory.span[:, None], memory.pos[:, None]),
        )
        slots.load(torch.tensor([0]), 0, one, one, *where, int(span), widest=[1])
        assert memory.live(int(span)) == slots.live(0) == 1 and memory.live(int(span) + 1) == slots.live(1) == 0
        assert lifetime(memory.span, ramp) == span + 1


def test_a_lifetime_ends_where_the_rule_says():
    g = torch.Generator().manual_seed(0)
    for ramp in (1e-6, 0.3, 1.0, 7.0, 8.001, 128.0, 1000.3):
        span = torch.rand(20000, generator=g) ** 4 * 2e5 - min(ramp, 3.0)
        span = torch.cat([span, span.round(), (span * 64).round() / 64, span.round() - ramp]).clamp_min(-ramp)
        life = lifetime(span, ramp)
        assert not is_alive(span - life, ramp).any() and is_alive(span - (life - 1), ramp)[life > 0].all()
    assert lifetime(torch.tensor([torch.inf]), 7.0) >= 2**60


def test_a_living_nan_is_not_hidden():
    x = torch.ones(1, 1, 4, 8)
    poisoned = x.clone()
    poisoned[:, :, 1] = torch.nan
    for impl in ("reference", "chunked"):
        y = expire_attention(x, x, poisoned, torch.full((1, 4), 9.0), ramp=1.0, impl=impl)
        assert bool(y[:, :, 1:].isnan().all())


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        ("reference", torch.int16),
        ("chunked", torch.int8),
        ("chunked", torch.uint8),
        ("chunked", torch.int32),
        ("triton", torch.int8),
    ],
    ids=str,
)
def test_narrow_positions_do_not_overflow(impl, dtype):
    """Ages of up to 254 steps from positions of 8 bits, without and with packed documents."""
    low, high = (0, 255) if dtype == torch.uint8 else (-127, 127)
    pos = torch.linspace(low, high, 12).round()
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 12, 32, generator=g) for _ in range(3))
    span, ids = torch.rand(1, 12, generator=g) * 300, torch.arange(12) // 7
    for documents in (None, ids):
        results = []
        for kind in (torch.int64, dtype):
            where = [pos.to(kind).to(DEVICE)] * 2
            docs = None if documents is None else documents.to(kind).to(DEVICE)
            tensors = [t.to(DEVICE) for t in (q, k, v, span)]
            results.append(expire_attention(*tensors, *where, ramp=3.0, impl=impl, documents=docs))
        assert torch.equal(*results)


@pytest.mark.parametrize("impl", ["reference", "chunked", "decode", "triton"])
def test_large_document_ids_keep_documents_apart(impl):
    """Ids may be hashes, the smallest and the largest integers of 64 bits included."""
    g = torch.Generator().manual_seed(0)
    x = {n: torch.randn(1, 1, 6, 32, generator=g).to(DEVICE) for n in "qkv"}
    x["span"] = torch.full((1, 6), 100.0, device=DEVICE)
    hashed = torch.tensor([-(2**63), -(2**63), 2**24, 2**24, 2**24, 2**63 - 1], device=DEVICE)
    small = torch.tensor([0, 0, 1, 1, 1, 2], device=DEVICE)
    with torch.set_grad_enabled(impl == "chunked"):
        plain, got = (_packed(x, ids, impl) for ids in (small, hashed))
    assert torch.equal(got, plain) and bool(got.any(-1).all())


def _packed(x: dict[str, Tensor], ids: Tensor, impl: str) -> Tensor:
    x = {n: t.clone().requires_grad_(impl == "chunked") for n, t in x.items()}
    return expire_attention(**x, ramp=3.0, documents=ids, impl="chunked" if impl == "decode" else impl)
