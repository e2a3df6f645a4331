"""ExpiringMemory: living memories stay in order, dead ones are deleted, and rows are independent."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span.ops import expire_attention
from expire_span.store import NEVER, ExpiringMemory
from tests.error_budget import DOUBLE

RAMP = 4.0


def fill(memory: ExpiringMemory, spans: torch.Tensor, block: int, start: int = 0) -> ExpiringMemory:
    """Append tokens start, start + 1, ... with the given spans [*rows, n] in blocks, expiring after each."""
    for first in range(0, spans.shape[-1], block):
        part = spans[..., first : first + block]
        pos = torch.arange(start + first, start + first + part.shape[-1])
        memory = memory.append(pos, part, token=pos.expand(part.shape).clone())
        memory = memory.expire(int(pos[-1]) + 1)
    return memory


def living(memory: ExpiringMemory, now: int) -> list[list[int]]:
    alive = memory.remaining(now) > 0
    return [row[mask].tolist() for row, mask in zip(memory["token"].flatten(0, -2), alive.flatten(0, -2))]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.sampled_from([(1,), (3,), (2, 2)]),
    count=st.integers(1, 150),
    block=st.integers(1, 50),
)
def test_holds_exactly_the_living_in_order(seed, rows, count, block):
    g = torch.Generator().manual_seed(seed)
    spans = torch.rand(*rows, count, generator=g) ** 4 * 100
    memory = fill(ExpiringMemory.empty(rows, ramp=RAMP), spans, block)
    steps = torch.arange(count)
    want = [steps[row - (count - steps) > -RAMP].tolist() for row in spans.reshape(-1, count)]
    assert living(memory, count) == want
    assert memory.live().tolist() == torch.tensor([len(w) for w in want]).reshape(rows).tolist()
    assert (memory.pos[..., 1:] >= memory.pos[..., :-1]).all(), "positions fall along a row"
    assert living(memory.compact(), count) == want


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), per_head=st.booleans())
def test_deleted_equals_undeleted(seed, per_head):
    """Attention over the store is attention over everything that ever was, outputs and gradients alike."""
    g = torch.Generator().manual_seed(seed)
    batch, heads, count, dim = 2, 2, 120, 8
    shape = (batch, heads, count) if per_head else (batch, count)
    spans = (torch.rand(shape, generator=g) ** 6 * 150).double()
    k, v, q = (torch.randn(batch, heads, count, dim, generator=g).double() for _ in range(3))
    memory = ExpiringMemory.empty(shape[:-1], ramp=RAMP)
    for n in range(count):
        keys, values = (x[:, :, n : n + 1] if per_head else x[:, :, n : n + 1].transpose(1, 2) for x in (k, v))
        memory = memory.append(torch.tensor([n]), spans[..., n : n + 1], k=keys, v=values).expire(n + 1)
    assert len(memory) < count, "nothing was deleted"
    t = torch.tensor([count])
    stored = [x if per_head else x.transpose(1, 2) for x in (memory["k"], memory["v"])]
    got = expire_attention(q[:, :, -1:], *stored, memory.span, t, memory.pos, ramp=RAMP)
    want = expire_attention(q[:, :, -1:], k, v, spans, t, torch.arange(count), ramp=RAMP, impl="reference")
    torch.testing.assert_close(got, want, rtol=0, atol=DOUBLE)


def test_size_and_work_stay_bounded_on_a_long_stream(monkeypatch):
    moved = []
    compact = ExpiringMemory.compact

    def counting(self):
        out = compact(self)
        moved.append(out.used)
        return out

    monkeypatch.setattr(ExpiringMemory, "compact", counting)
    memory = ExpiringMemory.empty(2, ramp=RAMP)
    peak = 0
    for n in range(3000):
        span = torch.tensor([[50.0 if n % 10 == 0 else 0.0]] * 2)
        memory = memory.append(torch.tensor([n]), span, x=torch.ones(2, 1, 8)).expire(n + 1)
        peak = max(peak, memory.bytes_held)
    alive = int(memory.live().max())
    assert alive <= 10
    assert memory.capacity <= 2 * alive + 3 * 32, "spare room is out of proportion to what lives"
    assert peak <= 2 * memory.bytes_held
    assert sum(moved) < 2 * 3000, "compaction copies more than a constant per appended memory"


def test_rows_do_not_wait_for_each_other():
    spans = torch.zeros(2, 200)
    spans[1] = 1000
    memory = fill(ExpiringMemory.empty(2, ramp=RAMP), spans, 10).compact()
    assert memory.live().tolist() == [3, 200]
    alone = memory.select(torch.tensor([0])).compact()
    assert len(alone) == 3 and alone.bytes_held < memory.bytes_held / 3


def test_cap_evicts_the_smallest_remaining_first_and_counts():
    spans = torch.tensor([[90.0, 10, 80, 20, 70, 60]])
    memory = fill(ExpiringMemory.empty(1, ramp=RAMP, cap=3), spans, 1)
    assert living(memory, 6) == [[0, 2, 4]]
    assert memory.evicted.tolist() == [3]
    assert fill(ExpiringMemory.empty(1, ramp=RAMP, cap=8), spans, 1).evicted.tolist() == [0]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), cap=st.integers(1, 20), block=st.integers(1, 30))
def test_cap_always_holds(seed, cap, block):
    spans = torch.rand(2, 100, generator=torch.Generator().manual_seed(seed)) * 50
    memory = fill(ExpiringMemory.empty(2, ramp=RAMP, cap=cap), spans, block)
    assert int(memory.live().max()) <= cap
    assert (memory.pos[..., 1:] >= memory.pos[..., :-1]).all()


def test_old_stores_stay_valid():
    """State in, state out: two continuations of one store do not see each other."""
    base = fill(ExpiringMemory.empty(1, ramp=RAMP), torch.full((1, 5), 100.0), 5)
    one, two = (base.append(torch.tensor([5]), torch.tensor([[100.0]]), token=torch.tensor([[t]])) for t in (71, 72))
    assert base["token"][0].tolist() == [0, 1, 2, 3, 4]
    assert one["token"][0].tolist() == [0, 1, 2, 3, 4, 71]
    assert two["token"][0].tolist() == [0, 1, 2, 3, 4, 72]


def test_blocks_too_large_for_the_spare_room_get_none():
    memory = ExpiringMemory.empty(2, ramp=1)
    for start in range(0, 4000, 400):
        pos = torch.arange(start, start + 400)
        span = torch.full((2, 400), 149.0)
        memory = memory.append(pos, span, k=torch.randn(2, 400, 3)).expire(start + 400)
        assert memory.capacity == memory.used == 149  # a query one step later finds ages 1 to 149
    memory = memory.append(torch.tensor([4000]), torch.ones(2, 1), k=torch.randn(2, 1, 3))
    assert memory.capacity > memory.used, "single steps are appended in place again"


def test_appending_reuses_the_room():
    memory = fill(ExpiringMemory.empty(1, ramp=RAMP), torch.full((1, 5), 100.0), 5)
    later = memory.append(torch.tensor([5]), torch.tensor([[100.0]]), token=torch.tensor([[5]]))
    assert later["token"].data_ptr() == memory["token"].data_ptr()


def test_select_fork_forget():
    spans = torch.full((3, 6), 100.0)
    memory = fill(ExpiringMemory.empty(3, ramp=RAMP), spans, 6)
    twice = memory.select(torch.tensor([2, 0, 0, 1]))
    assert twice.rows == (4,) and twice.live().tolist() == [6] * 4
    copy = memory.fork()
    copy["token"].zero_()
    assert memory["token"][0].tolist() == [0, 1, 2, 3, 4, 5]
    emptied = memory.forget_rows(torch.tensor([False, True, False]))
    assert emptied.live().tolist() == [6, 0, 6]
    assert (emptied.pos[1] == NEVER).all() and emptied["token"][1].sum() == 0


def test_state_dict_restores_everything():
    g = torch.Generator().manual_seed(0)
    memory = fill(ExpiringMemory.empty((2, 2), ramp=RAMP, cap=9), torch.rand(2, 2, 70, generator=g) * 60, 7)
    again = ExpiringMemory.from_state_dict(memory.state_dict())
    spans = torch.rand(2, 2, 40, generator=g) * 60
    a, b = fill(memory, spans, 3, start=70), fill(again, spans, 3, start=70)
    assert a.bytes_held == b.bytes_held and a.used == b.used
    assert all(torch.equal(a[name], b[name]) for name in a.slots)
    assert torch.equal(a.evicted, b.evicted)


def test_updated_spans_decide():
    memory = fill(ExpiringMemory.empty(1, ramp=RAMP), torch.full((1, 6), 100.0), 6)
    shorter = memory.with_span(torch.tensor([[0.0, 0, 50, 0, 0, 0]]))
    assert living(shorter, 20) == [[2]]
    assert living(memory, 20) == [[0, 1, 2, 3, 4, 5]]


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"ramp must be at least .* and at most .*, got 0"):
        ExpiringMemory.empty(1, ramp=0)
    with pytest.raises(ValueError, match="cap must be a whole number of at least 1, got 0"):
        ExpiringMemory.empty(1, ramp=1, cap=0)
    memory = fill(ExpiringMemory.empty(2, ramp=RAMP), torch.ones(2, 3), 3)
    with pytest.raises(ValueError, match=r"token must begin with shape \(2, 1\), got \(2, 2\)"):
        memory.append(torch.tensor([3]), torch.ones(2, 1), token=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"holds the fields .*'token'.* got .*'other'"):
        memory.append(torch.tensor([3]), torch.ones(2, 1), other=torch.ones(2, 1))


# Rows of unequal length


def unequal(count: int, seed: int = 0) -> torch.Tensor:
    """Spans [2, 4, count]: one head remembers long, the others do not."""
    spans = torch.rand(2, 4, count, generator=torch.Generator().manual_seed(seed)) * 20
    spans[:, 1] *= 40
    return spans


@pytest.mark.parametrize("block", [1, 7, 300])
def test_what_is_held_follows_each_row(block):
    memory = fill(ExpiringMemory.empty((2, 4), ramp=RAMP), unequal(1200), block).compact()
    alive = memory.live()
    assert memory.segments is not None and int(alive.max()) > 5 * int(alive.min())
    slot = sum(x.element_size() for x in memory.slots.values())
    room = 32 if block < 300 else 0
    mean = float(alive.float().mean())
    assert memory.bytes_held <= slot * 8 * (mean + max(mean / 2, room) + 1) + 8 * 16
    rectangle = memory.as_rectangle()
    assert rectangle.bytes_held > 1.25 * memory.bytes_held
    assert living(rectangle, 1200) == living(memory, 1200)


def test_no_row_reads_what_is_anothers():
    memory = fill(ExpiringMemory.empty((2, 4), ramp=RAMP), unequal(500), 50).compact()
    empty = memory.pos == NEVER
    assert empty.any() and (memory["token"][empty] == 0).all() and (memory.span[empty] == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), cap=st.sampled_from([None, 9]), data=st.data())
def test_layouts_agree(seed, cap, data):
    """Whatever is done to a store, segments and the rectangle hold the same memories."""
    spans = unequal(160, seed)
    stores = [ExpiringMemory.empty((2, 4), ramp=RAMP, cap=cap) for _ in range(2)]
    now = 0
    while now < 160:
        size = data.draw(st.integers(1, 40))
        stores = [fill(store, spans[..., now : now + size], size, now) for store in stores]
        now = min(now + size, 160)
        change = data.draw(st.sampled_from(["nothing", "compact", "forget", "swap", "save", "fork"]))
        stores = [changed(store, change) for store in stores]
        stores[1] = stores[1].as_rectangle()
        assert living(stores[0], now) == living(stores[1], now)
        assert stores[0].evicted.tolist() == stores[1].evicted.tolist()


def changed(memory: ExpiringMemory, change: str) -> ExpiringMemory:
    if change == "compact":
        return memory.compact()
    if change == "forget":
        return memory.forget_rows(torch.tensor([True, False]))
    if change == "swap":
        return memory.select(torch.tensor([1, 0]))
    if change == "save":
        return ExpiringMemory.from_state_dict(memory.state_dict())
    return memory.fork() if change == "fork" else memory


def test_segments_are_appended_in_place_and_old_stores_stay_valid():
    base = fill(ExpiringMemory.empty((2, 4), ramp=RAMP), unequal(600), 30).compact()
    assert base.segments is not None
    before = living(base, 600)
    one, two = (
        base.append(torch.tensor([600]), torch.full((2, 4, 1), 99.0), token=torch.full((2, 4, 1), t)) for t in (71, 72)
    )
    assert one.slots["pos"].data_ptr() == base.slots["pos"].data_ptr()
    assert two.slots["pos"].data_ptr() != base.slots["pos"].data_ptr()
    assert one["token"][..., -1].eq(71).all() and two["token"][..., -1].eq(72).all()
    assert living(base, 600) == before


def test_a_saved_store_in_segments_comes_back_whole():
    memory = fill(ExpiringMemory.empty((2, 4), ramp=RAMP), unequal(600), 10).compact()
    assert memory.segments is not None and memory.capacity > memory.used
    saved = memory.state_dict()
    back, again = (ExpiringMemory.from_state_dict(saved) for _ in range(2))
    assert back.bytes_held == memory.bytes_held and back.capacity == memory.capacity
    pos = torch.tensor([600])
    one, two = (m.append(pos, torch.ones(2, 4, 1), token=torch.full((2, 4, 1), t)) for m, t in ((back, 1), (again, 2)))
    assert one["token"][..., -1].eq(1).all() and two["token"][..., -1].eq(2).all(), "stores share what was saved"
    on = unequal(40, seed=1)
    assert living(fill(back, on, 1, 600), 640) == living(fill(memory, on, 1, 600), 640)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_lifetimes_have_all_their_digits_whatever_the_dtype(dtype):
    """A span of 300.7 in half precision is some other number, but the same one in the store and in the operator."""
    g = torch.Generator().manual_seed(0)
    for case in range(20):
        count, start = 400, 5000 * case
        span = (torch.rand(2, count, generator=g) ** 3 * 3000).to(dtype)
        pos = torch.arange(start, start + count)
        memory = ExpiringMemory.empty(2, ramp=RAMP).append(pos, span, token=pos.expand(2, -1).clone())
        now = start + count + int(torch.randint(0, 2500, (1,), generator=g))
        wide = span.double() if dtype == torch.float64 else span.float()
        want = [pos[row - (now - pos) > -RAMP].tolist() for row in wide]
        assert living(memory.expire(now).compact(), now) == want
        assert memory.span.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_other_dtypes_and_widths_than_are_stored_are_refused():
    memory = ExpiringMemory.empty(1, ramp=RAMP)
    memory = memory.append(torch.arange(3), torch.ones(1, 3), k=torch.ones(1, 3, 2, dtype=torch.bfloat16))
    one = dict(pos=torch.tensor([3]), span=torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"k must be torch.bfloat16, as what is stored, got torch.float32"):
        memory.append(**one, k=torch.ones(1, 1, 2))
    assert memory.append(**one, k=torch.ones(1, 1, 2), check_values=False)["k"].dtype == torch.bfloat16
    for width in (1, 2, 4):
        with pytest.raises(ValueError, match=rf"span must have shape \(1, 3\), got \(1, {width}\)"):
            memory.with_span(torch.ones(1, width))
    assert memory.with_span(torch.full((1, 3), 2.0)).span.eq(2).all()


def test_bad_memories_are_refused_with_both_values():
    memory = ExpiringMemory.empty(1, ramp=RAMP).append(torch.tensor([7]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="must not decrease from one memory to the next, got a step of -3"):
        memory.append(torch.tensor([4]), torch.ones(1, 1))
    with pytest.raises(ValueError, match="span must not be NaN, got 1 NaN of 2 values"):
        memory.append(torch.tensor([8, 9]), torch.tensor([[1.0, float("nan")]]))
    with pytest.raises(ValueError, match="span must be -ramp or more, -4 here, got a smallest value of -5"):
        memory.append(torch.tensor([8, 9]), torch.tensor([[1.0, -5.0]]))
    with pytest.raises(
        ValueError, match=r"span must be a float tensor of shape \(1, n\), got torch.int64 of shape \(1, 1\)"
    ):
        memory.append(torch.tensor([8]), torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(
        ValueError, match=r"span must be a float tensor of shape \(1, n\), got torch.float32 of shape \(\)"
    ):
        memory.append(torch.tensor([8]), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"pos must have shape \(2,\) or \(1, 2\), got \(3,\)"):
        memory.append(torch.arange(8, 11), torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"positions must be integers, got torch\.bool"):
        memory.append(torch.tensor([True]), torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"now must be a whole number, the position of the next query, got 9\.5"):
        memory.expire(9.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a saved memory must hold what state_dict gives, got one without .*'rows'"):
        ExpiringMemory.from_state_dict({})
    small = ExpiringMemory.empty(1, ramp=RAMP).append(torch.tensor([100], dtype=torch.int8), torch.full((1, 1), 300.0))
    assert small.pos.dtype == torch.int64 and small.live(390).tolist() == [1]


STORES = {
    "endless ramp": (dict(rows=1, ramp=float("inf")), r"ramp must be at least .* and at most 1.07374e\+09, got inf"),
    "ramp as text": (dict(rows=1, ramp="4"), "ramp must be one number, got '4'"),
    "half a cap": (dict(rows=1, ramp=4, cap=2.5), r"cap must be a whole number of at least 1, got 2\.5"),
    "rows as text": (dict(rows="2", ramp=4), r"rows must be B, \(B,\) or \(B, Hkv\) in whole numbers, got '2'"),
    "negative rows": (dict(rows=-1, ramp=4), "in whole numbers, got -1"),
}


@pytest.mark.parametrize("name", STORES)
def test_bad_stores_are_refused(name):
    options, words = STORES[name]
    with pytest.raises(ValueError, match=words):
        ExpiringMemory.empty(options.pop("rows"), **options)


def test_what_a_store_accepts_the_operator_accepts():
    """-7.3 in bfloat16 is -7.3125: the store holds float32, in which that is no rounding of -7.3 any more."""
    span = torch.full((1, 3), -7.3, dtype=torch.bfloat16)
    memory = ExpiringMemory.empty(1, ramp=7.3).append(torch.arange(3), span)
    x = torch.ones(1, 1, 3, 4)
    y = expire_attention(x[:, :, :1], x, x, memory.span, torch.tensor([2]), memory.pos, ramp=7.3)
    assert not y.any() and memory.live(2).tolist() == [0]


def test_a_block_that_is_long_beside_what_is_stored_is_copied_once():
    """It joins rows of unequal length in one rectangle, which the next `expire` compacts; one by one gives the same."""
    g = torch.Generator().manual_seed(5)
    scale = torch.tensor([8.0, 200.0])
    spans, x = torch.rand(2, 400, generator=g) * scale[:, None], torch.randn(2, 400, 3, generator=g)

    def feed(memory: ExpiringMemory, cuts: list[int]) -> ExpiringMemory:
        for start, stop in pairwise(cuts):
            part = x[:, start:stop].to(torch.bfloat16 if start == 0 else torch.float32)
            memory = memory.append(torch.arange(start, stop), spans[:, start:stop], check_values=False, k=part)
            memory = memory.expire(stop)
        return memory

    before = feed(ExpiringMemory.empty(2, ramp=4), [0, 100])
    assert before.segments is not None
    kept = {name: before[name].clone() for name in before.slots}
    joined = before.append(torch.arange(100, 400), spans[:, 100:], check_values=False, k=x[:, 100:])
    assert joined.segments is None and joined.used == joined.capacity == before.used + 300
    assert joined["k"].dtype == torch.bfloat16, "a store keeps the dtype that it began with"
    long, short = joined.expire(400).compact(), feed(before, [100, *range(101, 401)]).compact()
    assert long.used == short.used < 200
    for name in long.slots:
        assert torch.equal(long[name], short[name]), name
    assert all(torch.equal(before[name], old) for name, old in kept.items()), "the older version stays valid"
