"""Slots hold what an `ExpiringMemory` holds, at every step, in buffers that never change their shape."""

from __future__ import annotations

import pytest
import torch

from expire_span.store import ExpiringMemory
from expire_span.store.slots import FRESH, Slots, choose_capacity, count_living

ROWS, HEADS, DIM, RAMP = 2, 3, 4, 5.0


def living_of(store: ExpiringMemory, now: int) -> list[list[tuple[int, float]]]:
    """Birth and key of every living memory, per row and head, sorted."""
    alive = (store.remaining(now) > 0).flatten(0, 1)
    pos, key = store.pos.flatten(0, 1), store["k"][..., 0].flatten(0, 1)
    return [sorted(zip(p[a].tolist(), x[a].tolist())) for a, p, x in zip(alive, pos, key)]


def living_in(slots: Slots, column: int, epoch: int) -> list[list[tuple[int, float]]]:
    alive = (slots.left(column) > 0).flatten(0, 1)
    pos, key = slots.by_head(slots.pos).flatten(0, 1), slots.by_head(slots.k)[..., 0].flatten(0, 1)
    return [sorted(zip((p[a].long() + epoch).tolist(), x[a].tolist())) for a, p, x in zip(alive, pos, key)]


def memory_of_one(draw: torch.Generator, longest: float) -> tuple[torch.Tensor, ...]:
    k, v = (torch.randn(ROWS, HEADS, DIM, generator=draw) for _ in range(2))
    span = longest * torch.rand(ROWS, HEADS, generator=draw) ** 3 - RAMP / 2  # some are born on their ramp
    return k, v, span.round() if longest > 20 else span  # whole numbers meet the edge exactly


@pytest.mark.parametrize("cap", [None, 7])
@pytest.mark.parametrize("capacity", [(256,) * HEADS, (192, 256, 320)], ids=["rectangle", "ragged"])
@pytest.mark.parametrize("longest", [12.0, 150.0])
def test_the_same_memories_live_at_every_step(cap, capacity, longest):
    draw = torch.Generator().manual_seed(int(longest))
    slots = Slots(ROWS, DIM, capacity, ramp=RAMP, cap=cap)
    memory = ExpiringMemory.empty((ROWS, HEADS), ramp=RAMP, cap=cap)
    buffers = [x.data_ptr() for x in slots.tensors().values()]
    epoch = column = 0
    for t in range(3 * FRESH + 11):
        if column == FRESH:
            slots.compact()
            epoch, column = epoch + FRESH, 0
            assert living_in(slots, column, epoch) == living_of(memory, t), t
        k, v, span = memory_of_one(draw, longest)
        slots.append(k, v, span, column)
        slots.evict(column + 1)
        memory = memory.append(torch.tensor([t]), span[..., None], k=k[:, :, None], v=v[:, :, None]).expire(t + 1)
        column += 1
        assert living_in(slots, column, epoch) == living_of(memory, t + 1), t
    assert [x.data_ptr() for x in slots.tensors().values()] == buffers
    if cap is not None:
        assert slots.live(column).max() <= cap and torch.equal(slots.evicted, memory.evicted)


def filled(seed: int, steps: int, longest: float) -> tuple[ExpiringMemory, int]:
    draw = torch.Generator().manual_seed(seed)
    memory = ExpiringMemory.empty((ROWS, HEADS), ramp=RAMP)
    k, v = (torch.randn(ROWS, HEADS, steps, DIM, generator=draw) for _ in range(2))
    span = longest * torch.rand(ROWS, HEADS, steps, generator=draw) ** 3
    return memory.append(torch.arange(steps), span, k=k, v=v), steps


def test_a_store_is_loaded_into_rows_of_a_running_one():
    memory, now = filled(0, 200, 100.0)
    widest = count_living(memory.span, memory.pos, now, RAMP, HEADS).tolist()
    slots = Slots(5, DIM, [choose_capacity(n, 1000) for n in widest], ramp=RAMP)
    slots.append(torch.ones(5, HEADS, DIM), torch.ones(5, HEADS, DIM), torch.full((5, HEADS), 50.0), 16)
    slots.load(torch.tensor([3, 1]), 17, memory["k"], memory["v"], memory.span, memory.pos, now, widest=widest)
    found, wanted = living_in(slots, 17, now - 17), living_of(memory, now)
    assert found[3 * HEADS : 4 * HEADS] + found[HEADS : 2 * HEADS] == wanted
    assert slots.live(17)[[0, 2, 4]].tolist() == [[1] * HEADS] * 3
    assert int(slots.counts.max()) <= min(slots.capacity)


def test_growing_and_selecting_keep_what_lives():
    memory, now = filled(1, 150, 60.0)
    slots = Slots(ROWS, DIM, (64, 128, 64), ramp=RAMP)
    widest = count_living(memory.span, memory.pos, now, RAMP, HEADS).tolist()
    slots.load(torch.tensor([0, 1]), 3, memory["k"], memory["v"], memory.span, memory.pos, now, widest=widest)
    before = living_in(slots, 3, 0)
    slots = slots.grown((128, 128, 256))
    assert living_in(slots, 3, 0) == before and slots.capacity == (128, 128, 256)
    assert living_in(slots.selected(torch.tensor([1, 1])), 3, 0) == before[HEADS:] * 2


def test_positions_stay_small_for_ever():
    slots = Slots(1, DIM, (64,), ramp=RAMP)
    for _ in range(20):
        for column in range(FRESH):
            slots.append(torch.ones(1, 1, DIM), torch.ones(1, 1, DIM), torch.tensor([[30.0 - RAMP]]), column)
        slots.compact()
    assert slots.pos.abs().max() <= 2 * FRESH and int(slots.counts) == 29


def test_what_finds_no_room_is_dropped_and_never_written_elsewhere():
    slots = Slots(1, DIM, (64, 64), ramp=RAMP)
    for _ in range(2):
        for column in range(FRESH):
            slots.append(torch.ones(1, 2, DIM), torch.ones(1, 2, DIM), torch.tensor([[1000.0, 10.0 - RAMP]]), column)
        slots.compact()
    assert slots.live(0).tolist() == [[64, 9]]
