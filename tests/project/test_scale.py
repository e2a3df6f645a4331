"""The cost model of `benchmarks.scale`: what it counts is what the operator does, and its fit finds the costs."""

from __future__ import annotations

import pytest
import torch

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
