"""The cost model of `benchmarks.scale`: what it counts is what the operator does, and its fit finds the costs."""

from __future__ import annotations

import pytest
import torch

from benchmarks.devices import (
    Attention,
    Network,
    bytes_of_memory,
    count_headers,
    count_sends,
    fit_attention,
    read_anchors,
    read_attention,
)
from benchmarks.devices import predict as predict_devices
from benchmarks.scale import (
    CHUNK,
    FITTED,
    RAMP,
    Model,
    Room,
    Scenario,
    build_input,
    fit,
    pairs_in_play,
    predict,
    residuals_of,
)
from expire_span.ops.lists import live_lists
from expire_span.ops.rule import lifetime
from tests.operator_cases import Case
from tests.ops.test_context import traffic_of
from tests.ranks import Ranks
from tests.tiny import ROOT

ATTENTION = ROOT / "docs/data/attention-h200.json"


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as found:
        yield found


@pytest.mark.parametrize("workload", FITTED)
def test_pairs_in_play_are_those_of_the_live_lists(workload):
    tokens = 500
    span = build_input(8, tokens, workload, "cpu")[0, :, 0].detach() + 0.5  # lists may hold what is just dead
    pos = torch.arange(tokens)
    lists = live_lists(span[None], pos[None], pos[None], ramp=RAMP, causal=True, include_self=True, chunk=CHUNK)
    sizes = [len(pos[x.window[0] : x.window[1]]) if x.window else x.index.shape[1] for x in lists]  # type: ignore[union-attr]
    visited, alive = pairs_in_play(span)
    age = pos[:, None] - pos
    assert visited == sum(sizes) * CHUNK
    assert alive == int(((age >= 0) & (age < span + RAMP)).sum())


@pytest.mark.parametrize(("chunk", "seen"), [(5e-3, 5e-3), (0.0, 0.0), (-1e-3, 0.0)])
def test_fit_finds_the_costs(chunk, seen):
    true = Model(3e10, 2e10, chunk)
    rows = [
        {"matrix_flop": a * 1e9, "pair_flop": b * 1e8, "chunks": c, "seconds": 1.0}
        for a, b, c in [(1, 2, 8), (4, 30, 8), (16, 8, 16), (2, 50, 32), (9, 9, 32)]
    ]
    for row in rows:
        row["seconds"] *= 1 + residuals_of(true, [row])[0]
    found = fit(rows)
    assert found.chunk_seconds == pytest.approx(seen, abs=1e-12) and found.chunk_seconds >= 0
    if chunk == seen:
        assert (found.matrix_flops, found.pair_flops) == pytest.approx((3e10, 2e10))


def test_prediction_counts():
    scenario = Scenario("one", layers=2, dim=100, live=10, processes=4, block=50)
    p = predict(scenario, Model(1e9, 1e9, 0.0), Room(80.0, 20.0, 1.5), tokens=1000)
    assert p["store_mb"] == pytest.approx(10 * 100 * 4 * 1.5 / 1e6)
    assert p["store_mb_never_forgetting"] == pytest.approx(2 * 1000 * 100 * 2 / 1e6)
    assert p["kept_mb"] == pytest.approx((50 * 80 + 10 * 20) * 100 / 1e6)
    assert p["ddp_gb"] == pytest.approx(2 * 0.75 * 2 * 12 * 100**2 * 4 / 1e9)
    assert sum(p["share"].values()) == pytest.approx(1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("per_head", [False, True])
def test_bytes_sent_are_predicted_exactly(ranks, size, per_head):
    """Two and four processes send what the model of benchmarks.devices counts from the lifetimes alone, to the byte."""
    case = Case(batch=2, heads=4, kv_heads=2, dim=16, queries=size * 40, per_head=per_head)
    found = ranks.call(traffic_of, size, case, torch.float32)
    life = lifetime(case.tensors(torch.float32)["span"].detach(), 7.0)
    sends = count_sends(life, size).tolist()
    there, back = bytes_of_memory(1 if per_head else 2, 16, 4)
    assert [traffic.memories for traffic, _ in found] == [n * there for n in sends]
    assert sum(traffic.gradients for traffic, _ in found) == sum(sends) * back
    rows = case.batch * (case.kv_heads if per_head else 1)
    assert {traffic.headers for traffic, _ in found} == {count_headers(rows, case.batch, size)}


def test_what_a_border_is_crossed_by_is_what_lives():
    """Far from the ends, a rank sends as many memories as live at a time, whether they outlive one shard or several."""
    life = torch.randint(1, 400, (1, 8000), generator=torch.Generator().manual_seed(0))
    for size in (8, 80):
        inner = count_sends(life, size)[size // 4 : -size // 4].double().mean()
        assert float(inner) == pytest.approx(float(life.double().mean()) - 1, rel=0.1)
    rows = [predict_devices(Network(), 200.0, 10**6, devices) for devices in (8, 1024)]
    memories = [row["sent_mb"] - row["headers_mb"] for row in rows]
    assert memories[1] == pytest.approx(memories[0] * (1023 / 1024) / (7 / 8))
    assert rows[1]["headers_mb"] == pytest.approx(rows[0]["headers_mb"] * 1023 / 7)
    assert rows[1]["seconds"] == pytest.approx(rows[0]["seconds"] / 128)


def test_the_time_of_attention_is_that_of_the_gpu_record():
    """The fit is within a ninth of each row that it was made from, and within 5% of the million tokens that it was not."""
    cost = fit_attention(ATTENTION)
    fitted = read_anchors(ATTENTION)
    assert len(fitted) == 10 and max(abs(cost.error(row)) for row in fitted) < 0.11
    million = read_attention(ATTENTION, "linear")[-1]
    assert million.name.startswith("1,8,1048576,64") and abs(cost.error(million)) < 0.05
    assert cost.dense_flops == pytest.approx(Attention().dense_flops, rel=0.02)
    assert Attention().seconds(1e9, 1e15) == pytest.approx(cost.seconds(1e9, 1e15), rel=0.02)
