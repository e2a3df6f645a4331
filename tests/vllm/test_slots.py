"""Slots in blocks, as the vLLM plugin uses them, with hand-made blocks: against the definition in float64, deleting nothing."""

import pytest
import torch

from expire_span.ops import expire_attention
from expire_span.ops.rule import FOREVER
from expire_span.store.order import find_living
from expire_span.vllm.slots import ALIGNMENT, BlockSlots
from tests.error_budget import assert_within_budget

HEADS, GROUP, DIM, RAMP, COUNT = 2, 2, 8, 4.0, 80
PLENTY = (23, 23)  # spans are below 20, so a memory lives for at most 24 tokens, and the next query sees 23
CHUNKS = {
    "step by step": [1] * COUNT,
    "whole": [COUNT],
    "chunks and steps": [7, 1, 1, 30, 1, 2, 38],
    "a chunk longer than all slots": [1, 60, 19],
}


def draw(seed: int = 1, count: int = COUNT, dtype=torch.float32):
    """Queries, keys, values and spans of one request."""
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(count, HEADS * GROUP, DIM, generator=g)
    k, v = (torch.randn(count, HEADS, DIM, generator=g) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.rand(count, HEADS, generator=g) * 20


def make_slots(capacity=PLENTY, blocks: int = 4, dtype=torch.float32, ramp: float = RAMP) -> BlockSlots:
    """Slots whose blocks do not lie side by side, and hold what is worst: NaN everywhere."""
    slots = BlockSlots(capacity, DIM, ramp=ramp, scale=DIM**-0.5, dtype=dtype)
    width = slots.block_bytes // dtype.itemsize
    slots.bind(torch.full((blocks, width + ALIGNMENT), torch.nan, dtype=dtype)[:, :width])
    return slots


def feed(slots: BlockSlots, parts, chunks, block: int = 2, **how):
    """All outputs of one request, and how many memories were lost."""
    slots.clear(torch.tensor([block]))
    out, lost, start = [], 0, 0
    for size in chunks:
        now = [x[start : start + size] for x in parts]
        if size == 1:
            y, gone = slots.step(*now, torch.tensor([block]), torch.tensor([start]), **how)
        else:
            y, gone = slots.chunk(*now, block, start, **how)
        out.append(y)
        lost, start = lost + int(gone), start + size
    return torch.cat(out), lost


def definition(parts, dtype, ramp: float = RAMP):
    q, k, v, span = (x.to(dtype).transpose(0, 1).unsqueeze(0) for x in parts)
    return expire_attention(q, k, v, span, ramp=ramp, impl="reference")[0].transpose(0, 1)


@pytest.mark.parametrize("capacity", [PLENTY, (60, 23)], ids=["equal heads", "unequal heads"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
def test_slots_are_the_definition(chunks, capacity):
    parts = draw()
    y, lost = feed(make_slots(capacity), parts, chunks)
    assert lost == 0
    assert_within_budget(y, definition(parts, torch.float64), definition(parts, torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slots_of_half_precision(dtype):
    parts = draw(dtype=dtype)
    y, _ = feed(make_slots(dtype=dtype), parts, CHUNKS["chunks and steps"])
    exact = definition([x.double() for x in parts], torch.float64)
    assert_within_budget(y.float(), exact, exact.to(dtype).float())


def test_as_many_slots_as_live_and_no_more():
    """With one slot less than the largest number of living memories, memories are lost; with as many, none is."""
    parts = draw()
    span, births = parts[3], torch.arange(COUNT)
    ages = torch.arange(1, COUNT + 1).view(-1, 1) - births  # of the queries that come after each token
    alive = (span.unsqueeze(0) - ages.unsqueeze(-1) > -RAMP) & (ages >= 1).unsqueeze(-1)
    peak = alive.sum(1).amax(0).tolist()
    assert feed(make_slots(peak), parts, CHUNKS["step by step"])[1] == 0
    assert feed(make_slots([peak[0], peak[1] - 1]), parts, CHUNKS["step by step"])[1] > 0


def test_requests_of_different_lengths_step_together():
    """Three requests, in blocks in any order, one of which begins later and takes a block that another one left."""
    requests, slots = [draw(seed) for seed in range(3)], make_slots()
    blocks, delay = torch.tensor([3, 0, 1]), [0, 10, 37]
    outs: list[list[torch.Tensor]] = [[], [], []]
    for turn in range(COUNT):
        live = [n for n in range(3) if delay[n] <= turn]
        now = torch.tensor([turn - delay[n] for n in live])
        slots.clear(blocks[[n for n in live if delay[n] == turn]])
        parts = [torch.stack([requests[n][part][turn - delay[n]] for n in live]) for part in range(4)]
        y, lost = slots.step(*parts, blocks[live], now)
        assert not lost.any()
        for n, row in zip(live, y):
            outs[n].append(row)
    for request, out in zip(requests, outs):
        y = torch.stack(out)
        exact, rounded = (definition(request, dtype)[: len(y)] for dtype in (torch.float64, torch.float32))
        assert_within_budget(y, exact, rounded)


def test_a_block_that_changes_hands_remembers_nothing():
    parts, slots = draw(), make_slots()
    feed(slots, [x * torch.inf if n < 3 else x for n, x in enumerate(draw(9))], [40])
    y, _ = feed(slots, parts, CHUNKS["chunks and steps"])
    assert_within_budget(y, definition(parts, torch.float64), definition(parts, torch.float32))


@pytest.mark.parametrize("chunks", [[1] * COUNT, [5, 1, 1, 20, 1, 52]], ids=["step by step", "chunks"])
def test_eviction_keeps_those_with_the_most_steps_left(chunks):
    """Against the store's rule over all memories; the first tokens are kept for ever and so are never evicted."""
    parts, capacity = draw(), 6
    parts[3][:2] = FOREVER
    slots = make_slots((capacity, capacity))
    _, lost = feed(slots, parts, chunks, evict=True)
    assert lost > 0
    for head in range(HEADS):
        span, alive, pos = parts[3][:, head], torch.zeros(COUNT, dtype=torch.bool), torch.arange(COUNT)
        end, gone = 0, 0
        for size in chunks:
            alive[end : end + size] = True
            end += size
            left = (span - (end - pos) + RAMP).masked_fill(~alive, -torch.inf)
            alive, evicted = find_living(left[:end], capacity)
            gone += 0 if evicted is None else int(evicted)
            alive = torch.nn.functional.pad(alive, (0, COUNT - end))
        where = slots.place[head]
        held = torch.isfinite(slots.fields.span[2, where])
        held &= slots.fields.span[2, where] - (COUNT - slots.fields.pos[2, where]) > -RAMP
        assert sorted(slots.fields.pos[2, where][held].tolist()) == pos[alive].tolist()
    assert slots.live(torch.tensor([2]), torch.tensor([COUNT])).tolist() == [[capacity] * HEADS]


def test_a_full_head_loses_newcomers_and_says_how_many():
    parts = draw()
    parts[3][:] = 1000.0
    y, lost = feed(make_slots((10, 30)), parts, [1] * COUNT)
    assert lost == 70 + 50
    assert torch.isfinite(y).all()


def test_a_window_needs_a_slot_less_than_it_has_tokens():
    parts, window = draw(), 16
    parts[3][:] = window - 1.0
    y, lost = feed(make_slots((window - 1, window - 1), ramp=0.5), parts, CHUNKS["chunks and steps"])
    assert lost == 0
    q, k, v, _ = (x.double().transpose(0, 1) for x in parts)
    age = torch.arange(COUNT).view(-1, 1) - torch.arange(COUNT)
    k, v = (x.repeat_interleave(GROUP, 0) for x in (k, v))
    scores = (q @ k.mT * DIM**-0.5).masked_fill((age < 0) | (age >= window), -torch.inf)
    exact = (scores.softmax(-1) @ v).transpose(0, 1)
    assert_within_budget(y, exact, definition(parts, torch.float32, ramp=0.5))


def test_bytes_of_a_block_are_those_of_its_slots():
    slots = BlockSlots((10, 3), 8, ramp=4.0, scale=1.0, dtype=torch.bfloat16)
    content = 13 * (2 * 8 * 2 + 8)
    assert content <= slots.block_bytes < content + ALIGNMENT and slots.block_bytes % ALIGNMENT == 0
