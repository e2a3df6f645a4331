"""The backend's attention without an engine: batches as vLLM describes them, made by hand, against the definition in float64.

It runs in plain PyTorch and through the kernel: on a GPU as it is, elsewhere interpreted. vLLM need not be installed.
"""

import logging
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from expire_span.ops.rule import FOREVER
from expire_span.vllm import slots as slots_module
from expire_span.vllm.batches import BlockAttention, read_batch, read_metadata
from expire_span.vllm.slots import ALIGNMENT, BlockSlots
from tests.error_budget import assert_within_budget, reordered
from tests.triton_interpreter import DEVICE, ON_GPU, block_slots
from tests.vllm.test_slots import DIM, PLENTY, RAMP, definition, draw

pytestmark = [pytest.mark.gpu] if ON_GPU else []
LAYERS, BLOCKS = 2, 6
PLACES = {"a": 4, "b": 0, "c": 2}
"""Which block each request has."""
MIXED = [
    [("a", 1)],
    [("b", 30), ("a", 1)],
    [("a", 1), ("c", 0), ("b", 1)],  # a request that waits has no row
    [("c", 7), ("b", 2), ("a", 1)],
    *[[("a", 1), ("b", 1), ("c", 1)]] * 3,
    [("b", 1), ("a", 41), ("c", 1)],
    *[[("c", 1), ("a", 1), ("b", 1)]] * 2,
]
"""Batches: which requests add how many tokens. Decoding and chunks of prompts are mixed, in any order."""


@pytest.fixture(params=["plain", "kernel"])
def launches(request, monkeypatch):
    """The kernels launched so far; the attention goes in plain PyTorch or through the kernel."""
    fused, found, launch = request.param == "kernel", [], block_slots.run_kernel

    def run_kernel(kernel, *args, **constants) -> None:
        found.append(kernel)
        with pytest.MonkeyPatch.context() as patch:
            if not ON_GPU:  # chunks of prompts stay in plain PyTorch
                patch.setenv("TRITON_INTERPRET", "1")
            launch(kernel, *args, **constants)

    monkeypatch.setattr(slots_module, "slot_kernel_serves", lambda impl, like: fused)
    monkeypatch.setattr(block_slots, "run_kernel", run_kernel)
    return SimpleNamespace(fused=fused, found=found)


class Layer:
    """A layer's attention, its cache, and the requests' tokens there."""

    def __init__(self, seed: int, capacity=PLENTY, dtype=torch.float32, **how) -> None:
        self.attention, self.dtype = BlockAttention(), dtype
        slots = BlockSlots(capacity, DIM, ramp=RAMP, scale=DIM**-0.5, dtype=dtype)
        self.attention.set_up(slots, **{"keep_first": 0, "evict": False, "name": f"layer {seed}", **how})
        width = (slots.block_bytes + ALIGNMENT) // dtype.itemsize
        self.cache = torch.full((BLOCKS, width), torch.nan, dtype=dtype, device=DEVICE)  # what is worst
        self.parts = {name: draw(10 * seed + n, dtype=dtype) for n, name in enumerate(PLACES)}
        self.outputs: dict[str, list[torch.Tensor]] = {name: [] for name in PLACES}

    def read(self, batch: list[tuple[str, int]], done: dict[str, int], described) -> None:
        mine = [[x[done[name] : done[name] + count] for x in self.parts[name]] for name, count in batch]
        q, k, v, span = (torch.cat(x).to(DEVICE) for x in zip(*mine))
        y = self.attention.attend(q, k, v, span, self.cache, read_batch(described, DEVICE), torch.empty_like(q))
        for (name, _), part in zip(batch, y.split([count for _, count in batch])):
            self.outputs[name].append(part.cpu())


def describe(batch: list[tuple[str, int]], done: dict[str, int]):
    """What vLLM says of a batch; the block table has more columns than the one that is used."""
    edges = torch.tensor([0] + [count for _, count in batch]).cumsum(0).to(torch.int32)
    lengths = torch.tensor([done[name] + count for name, count in batch], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[PLACES[name], -1, 99] for name, _ in batch], dtype=torch.int32, device=DEVICE)
    return SimpleNamespace(query_start_loc_cpu=edges, seq_lens=lengths, block_table_tensor=table)


def run(layers: list[Layer], batches: list[list[tuple[str, int]]]) -> None:
    done = dict.fromkeys(PLACES, 0)
    for batch in batches:
        for layer in layers:
            layer.read(batch, done, describe(batch, done))
        for name, count in batch:
            done[name] += count


def check(layer: Layer, name: str, keep_first: int = 0) -> None:
    got = torch.cat(layer.outputs[name])
    parts = [x.clone() for x in layer.parts[name]]
    parts[3][:keep_first] = FOREVER
    exact = definition([x.double() for x in parts], torch.float64)[: len(got)]
    rounded = definition(parts, torch.float32)[: len(got)] if layer.dtype == torch.float32 else exact.to(layer.dtype)
    assert_within_budget(got.float(), exact, rounded.float(), name=name)


@pytest.mark.parametrize(
    ("dtype", "keep_first"), [(torch.float32, 0), (torch.bfloat16, 3)], ids=["float32", "bfloat16"]
)
def test_mixed_batches_are_the_definition(launches, dtype, keep_first):
    capacity = tuple(x + keep_first for x in (60, 23))
    layers = [Layer(seed, capacity, dtype, keep_first=keep_first) for seed in range(LAYERS)]
    run(layers, MIXED)
    for layer in layers:
        for name in PLACES:
            check(layer, name, keep_first)
        assert layer.attention.evicted == 0
    steps = sum(any(count == 1 for _, count in batch) for batch in MIXED)
    assert len(launches.found) == (LAYERS * steps if launches.fused else 0), "one for each layer and batch that decodes"
    assert all(x is block_slots._step for x in launches.found)


def test_a_request_that_begins_again_remembers_nothing(launches):
    """As after preemption: it is read again from its first token, in one chunk, in the block that it or another one had."""
    layer = Layer(1)
    run([layer], MIXED[:5])
    layer.outputs = {name: [] for name in PLACES}
    run([layer], [[("b", 1), ("a", 20)], [("a", 1), ("b", 1)]])
    check(layer, "a")
    check(layer, "b")


def test_a_full_head_fails_its_own_request_and_no_other(launches):
    layer = Layer(2, (23, 8))
    for span in (x[3] for name, x in layer.parts.items() if name != "a"):
        span[:] = 3.0  # these live for at most 7 tokens, the ones of "a" for up to 24
    run([layer], MIXED)
    assert torch.cat(layer.outputs["a"]).isnan().any()
    check(layer, "b")
    check(layer, "c")


def test_evicted_memories_are_counted_and_told_once(launches, caplog):
    fused, plain = Layer(3, (9, 30), evict=True), Layer(3, (9, 30), evict=True)
    with caplog.at_level(logging.WARNING, "vllm.expire_span"):
        run([fused], MIXED)
    assert "a head of layer 3 has more memories than its 30 slots" in caplog.text and len(caplog.records) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots_module, "slot_kernel_serves", lambda impl, like: False)
        run([plain], MIXED)
    assert fused.attention.evicted == plain.attention.evicted > 0
    for name in PLACES:
        got, want = (torch.cat(x.outputs[name]) for x in (fused, plain))
        assert float((got - want).abs().max()) < reordered(100, depth=2)


@pytest.mark.skipif(not ON_GPU, reason="a CPU waits for everything")
@pytest.mark.parametrize("evict", [False, True])
def test_the_host_waits_for_nothing_while_it_decodes(launches, evict):
    if not launches.fused:
        pytest.skip("plain PyTorch looks for free slots on the host")
    layer, batch = Layer(4, evict=evict), [("a", 1), ("b", 1)]
    run([layer], [batch] * 2)
    q, k, v, span = (torch.stack([layer.parts[x][n][2] for x in "ab"]).to(DEVICE) for n in range(4))
    m, y = read_metadata([0, 1, 2], [3, 3], [PLACES["a"], PLACES["b"]], DEVICE), torch.empty_like(q)
    layer.attention.attend(q, k, v, span, layer.cache, m, y)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer.attention.attend(q, k, v, span, layer.cache, m, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_metadata_says_who_decodes_and_who_begins():
    m = read_metadata([0, 1, 1, 6, 7], [5, 9, 5, 1], [3, 1, 0, 2], "cpu")
    assert (m.rows.tolist(), m.blocks.tolist(), m.now.tolist()) == ([0, 6], [3, 2], [4, 0])
    assert m.chunks == [(1, 6, 0, 0)] and m.begun.tolist() == [0, 2]
