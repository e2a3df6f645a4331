"""The plan of the fused kernels: which memory tiles each query tile reads, and where padding slots are placed."""

import pytest
import torch

from expire_span.ops.reference import ages, expiry_mask
from tests.operator_cases import Case
from tests.triton_interpreter import DEVICE, ON_GPU, layout, lists, small_tiles

pytestmark = [pytest.mark.usefixtures(small_tiles.__name__), *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.mark.parametrize(("longest", "window"), [pytest.param(1e6, 0, marks=pytest.mark.long), (300.0, 25)])
def test_runs_hold_all_that_lives_and_full_tiles_need_no_mask(longest, window):
    """Each query tile's runs, compared with the mask: no living memory is missed, and hardly a dead tile is read.

    With a window, full tiles hold no memory of that age or younger either.
    """
    case, block_m, block_n, ramp = Case(1, 1, 1, 150, 60, 32, gaps=True), 8, 4, 7.0
    x = {n: t.detach().to(DEVICE) for n, t in case.tensors(torch.float32).items()}
    rand = torch.rand(x["span"].shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    span = (torch.where(rand < 0.2, longest, 5.0) if longest > 300 else rand**2 * longest).unsqueeze(1)
    q_pos, k_pos = x["q_pos"].view(1, 1, -1), x["k_pos"].view(1, 1, -1)
    options = dict(ramp=ramp, include_self=True, block_m=block_m, block_n=block_n)
    plan = lists.build_plan(x["k"], x["v"], span, q_pos, k_pos, None, None, window=window, **options)
    age = ages(q_pos, k_pos, causal=True)
    mask = expiry_mask(span, age, ramp=ramp, include_self=True)[0, 0]  # [T, S]
    mask = torch.where((age[0, 0] <= window) & (mask == 1) & (window > 0), 0.5, mask)
    order = plan.order[0].long().view(-1, block_n)[: int(plan.class_tiles[0, lists.NUM_CLASSES - 1])]
    counts = torch.zeros(4)
    for rows, runs in zip(mask.split(block_m), plan.entries(block_m, block_n)[0].tolist()):
        full, masked = _expand(runs[2:], runs[0]), _expand(runs[2 + 2 * lists.NUM_CLASSES :], runs[1])
        tiles = torch.where(order >= 0, rows[:, order.clamp_min(0)], 0.0)  # [M, tiles, N]
        assert bool((tiles[:, full] == 1).all())
        unlisted = torch.ones(len(order), dtype=torch.bool)
        unlisted[full + masked] = False
        assert float(tiles[:, unlisted].sum()) == 0
        alive = int((tiles > 0).any(0).any(-1).sum())
        counts += torch.tensor([len(full), int((tiles == 1).all(0).all(-1).sum()), len(full + masked), alive])
    if not ON_GPU:  # with the short classes of these tests
        assert counts[0] >= 0.8 * counts[1] > 0 and counts[2] <= 1.1 * counts[3], counts


def test_classes_too_thin_for_tiles_of_their_own_are_joined():
    """Of 200 memories nearly all live 5 steps; the few that live longer, with different lengths, share tiles."""
    case, block_n = Case(1, 1, 1, 200, 0, 32), 4
    x = {n: t.detach().to(DEVICE) for n, t in case.tensors(torch.float32).items()}
    span = torch.full((1, 1, 200), 5.0, device=DEVICE)
    for n, at in enumerate(range(5, 105, 20)):
        span[0, 0, at] = 10.0 * 2**n
    options = dict(ramp=1.0, include_self=True, block_m=8, block_n=block_n)
    plan = lists.build_plan(
        x["k"], x["v"], span, x["q_pos"].view(1, 1, -1), x["k_pos"].view(1, 1, -1), None, None, **options
    )
    first = plan.class_tiles[0].tolist()
    filled = [n for n in range(lists.NUM_CLASSES - 1) if first[n + 1] > first[n]]
    assert len(filled) <= 3, filled  # those still alive at the end, the short, and those between
    order = plan.order[0][: first[lists.NUM_CLASSES - 1] * block_n]
    assert sorted(order[order >= 0].tolist()) == list(range(200))


def test_padding_has_no_place_in_a_table_of_young_ages():
    """Else a tile's queries beyond the last would write into the next row's part of the table's gradient."""
    case, block_m, block_n = Case(1, 1, 1, 40, stored=11, dim=32), 32, 16
    x = {n: t.detach().to(DEVICE) for n, t in case.tensors(torch.float32).items()}
    x["k_pos"][:3], x["span"][:, :3] = -(2**40), 0.0  # padding of a store's row
    where = x["span"].view(1, 1, -1), x["q_pos"].view(1, 1, -1), x["k_pos"].view(1, 1, -1)
    options = dict(ramp=7.0, include_self=False, block_m=block_m, block_n=block_n, window=512)
    plan = lists.build_plan(x["k"], x["v"], *where, None, None, **options)
    slots = int(plan.class_tiles[0, lists.NUM_CLASSES]) * block_n
    born = plan.births[0, :slots]
    entries = plan.entries(block_m, block_n)[0]
    since = entries[:, layout.RUN_WORDS :].contiguous().view(torch.float32).int()
    age = (since + entries[:, [layout.POSITION_AT.value]]).view(-1, 1) - born  # in 32 bits, as the kernels have it
    real = (torch.arange(len(age), device=DEVICE) < 40)[:, None] & (plan.order[0, :slots] >= 0)
    assert not bool(real.all(0).any()) and not bool(real.all(1).any()), "the case has no padding"
    assert not bool(((age >= 1) & (age <= 512) & ~real).any())
    seen = ages(where[1], where[2].clamp_min(-(2**30)), causal=True)[0, 0]
    assert int(((age >= 1) & real).sum()) == int((seen >= 1).sum())


def _expand(runs: list[int], count: int) -> list[int]:
    tiles: list[int] = []
    while len(tiles) < count:
        start, length, *runs = runs
        tiles += range(start, start + length)
    assert len(tiles) == count
    return tiles
