"""The kernel for slots in blocks equals the plain step, in its outputs and in the blocks. It runs on a GPU, or interpreted."""

import pytest
import torch

pytest.importorskip("triton")

from expire_span.ops.rule import FOREVER
from expire_span.vllm.slots import ALIGNMENT, BlockSlots
from tests.error_budget import reordered
from tests.triton_interpreter import DEVICE, ON_GPU, block_slots

pytestmark = [pytest.mark.gpu] if ON_GPU else []
HEADS, RAMP, TURNS = 2, 3.0, 14


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    if not ON_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def make(capacity, dim: int, dtype: torch.dtype) -> BlockSlots:
    slots = BlockSlots(capacity, dim, ramp=RAMP, scale=dim**-0.5, dtype=dtype)
    width = slots.block_bytes // dtype.itemsize
    slots.bind(torch.full((5, width + ALIGNMENT), torch.nan, dtype=dtype, device=DEVICE)[:, :width])
    slots.clear(torch.tensor([3, 1, 4], device=DEVICE))
    return slots


@pytest.mark.parametrize(
    ("capacity", "group", "dim", "dtype", "evict"),
    [
        ((40, 7), 3, 8, torch.float32, False),  # heads of different sizes, one of which runs out of slots
        ((5, 35), 2, 24, torch.float32, True),
        ((40, 40), 1, 16, torch.bfloat16, False),
    ],
    ids=["a full head", "eviction", "half precision"],
)
def test_the_kernel_is_the_plain_step(capacity, group, dim, dtype, evict):
    """Three requests at different positions, far from the start, whose spans differ by token and head."""
    plain, fused = make(capacity, dim, dtype), make(capacity, dim, dtype)
    g = torch.Generator().manual_seed(3)
    blocks, begin = torch.tensor([[3, 0], [1, 70_000], [4, 9]], device=DEVICE).unbind(
        1
    )  # which do not lie side by side
    lost = 0
    for turn in range(TURNS):
        q, k, v = (torch.randn(3, n, dim, generator=g).to(DEVICE, dtype) for n in (HEADS * group, HEADS, HEADS))
        span = (torch.rand(3, HEADS, generator=g) * 9).to(DEVICE)
        span[0] = FOREVER if turn < 2 else span[0].floor()  # of equal lives, the oldest is evicted first
        parts = (q, k, v, span, blocks, begin + turn)
        want, gone = plain.plain_step(*parts, evict=evict)
        got, gone_too = block_slots.triton_block_step(
            *parts, fused.fields, fused.bounds, ramp=RAMP, scale=plain.scale, evict=evict
        )
        error = (got.float() - want.float()).abs().max()
        assert error < reordered(100, depth=2, dtype=dtype if dtype == torch.float32 else torch.bfloat16)
        assert gone.tolist() == gone_too.tolist()
        lost += int(gone.sum())
        for x, y in zip(plain.fields, fused.fields):
            assert torch.equal(x[blocks], y[blocks])
    assert (lost > 0) == (min(capacity) < 14)
