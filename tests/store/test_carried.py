"""The memory that training carries: exactly the living memories, in order of birth, in shapes that do not depend on the
deaths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span.store import NEVER, HiddenMemory, trim_states
from expire_span.store.hidden import choose_width

RAMP, DIM = 2.0, 3


def run_blocks(spans, block, cap=None):
    """Feed memories with the given lifetimes (rows x tokens) block by block; each one's hidden state is its birth + 1."""
    rows, tokens = spans.shape
    memory = HiddenMemory.empty(rows, DIM, dtype=torch.float64, device=torch.device("cpu"))
    for start in range(0, tokens, block):
        (state,) = trim_states([{"memory": memory}])
        memory, count = state["memory"], min(block, tokens - start)
        births = torch.arange(start, start + count, dtype=torch.float64)
        new = (births + 1)[None, :, None].expand(rows, count, DIM)
        hidden, pos = memory.extended(new, torch.arange(count))
        born = hidden[..., 0].long() - 1
        known = torch.where(born >= 0, spans.gather(1, born.clamp_min(0)), 0.0)
        memory = memory.after(hidden, pos, known, block=count, ramp=RAMP, cap=cap)
        assert memory.hidden.shape[1] == hidden.shape[1], "the shape must not depend on what died"
    return memory


def stored_births(state, row):
    alive = state.pos[row] != NEVER
    births = state.hidden[row, alive, 0].long() - 1
    assert bool((state.hidden[row, ~alive] == 0).all()), "a dead memory was not wiped"
    assert bool(alive[:-1].le(alive[1:]).all()) if len(alive) else True, "dead slots belong in front"
    return births.tolist()


lifetimes = st.lists(st.integers(0, 40), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None)
@given(lifetimes, st.integers(1, 17))
def test_exactly_the_living_are_kept(spans, block):
    spans = torch.tensor([spans, spans[::-1]], dtype=torch.float64)
    state, now = run_blocks(spans, block), spans.shape[1]
    for row in range(2):
        want = [i for i in range(now) if spans[row, i] - (now - i) > -RAMP]
        assert stored_births(state, row) == want
        assert int(state.living[row]) == len(want)
        alive = state.pos[row] != NEVER
        assert (state.pos[row, alive] + now).tolist() == want, "positions count from the block to come"


@settings(max_examples=40, deadline=None)
@given(lifetimes, st.integers(1, 17), st.integers(1, 6))
def test_cap_keeps_the_longest_lived_and_counts_the_rest(spans, block, cap):
    state = run_blocks(torch.tensor([spans], dtype=torch.float64), block, cap)
    births = stored_births(state, 0)
    assert len(births) <= cap and births == sorted(births)
    free = run_blocks(torch.tensor([spans], dtype=torch.float64), block)
    assert (int(state.evicted) > 0) or births == stored_births(free, 0)


@given(st.integers(0, 5000), st.integers(0, 9000), st.integers(0, 600))
def test_widths_hold_the_living_without_waste(count, before, block):
    most = max(before, count) + block
    width = choose_width(count, before, most)
    assert count <= width <= most
    assert width <= 1.75 * count + 12


def test_widths_are_slow_to_shrink_and_quick_to_grow():
    assert choose_width(900, 1000, 2000) == 1000, "a little less: the same shape"
    assert choose_width(300, 1000, 2000) < 400, "much less: a smaller one"
    assert choose_width(1100, 1000, 2000) >= 1100


def test_settled_states_hold_no_hidden_memory():
    state = run_blocks(torch.full((2, 400), 3.0, dtype=torch.float64), 100)
    (trimmed,) = trim_states([{"memory": state}])
    small = trimmed["memory"]
    assert small.living is None and small.pos.shape[1] <= 16
    assert small.hidden.untyped_storage().nbytes() == small.hidden.numel() * 8
    assert trim_states([trimmed, None, {"h": 1}]) == [trimmed, None, {"h": 1}]


@pytest.mark.parametrize("initial", [0, 5])
def test_emptied_rows_hold_the_start_and_others_what_they_held(initial):
    state = run_blocks(torch.full((3, 30), 8.0, dtype=torch.float64), 10)
    evicted = torch.zeros(3, dtype=torch.int64)
    start = HiddenMemory(torch.full((3, initial, DIM), 7.0), torch.arange(-initial, 0).expand(3, -1), evicted)
    after = state.forget_rows(torch.tensor([False, True, False]), start)
    assert stored_births(after, 0) == stored_births(state, 0) == stored_births(after, 2)
    assert stored_births(after, 1) == [6] * initial
    assert int(after.living[1]) == initial
