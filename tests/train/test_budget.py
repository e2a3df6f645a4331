"""The budget controller: it reaches its target, waits, weakens while the task loss is high, and is restored exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expire_span.settings.run import BudgetConfig, DecoderConfig
from expire_span.train.budget import LARGEST_ERROR, BudgetController
from expire_span.train.evaluate import memory_bytes


def build(**fields) -> BudgetController:
    return BudgetController(BudgetConfig(**{"live": 50.0, **fields}), layers=2, bytes_per_memory=100)


def feed(controller, live: float, loss: float = 1.0, times: int = 1) -> float:
    for _ in range(times):
        controller.update(torch.tensor(live), torch.tensor(loss))
    return float(controller.weight)


@settings(max_examples=6, deadline=None)
@given(target=st.floats(5, 500), scale=st.floats(-6, -2), slope=st.floats(0.2, 1.0), lag=st.integers(1, 8))
def test_reaches_the_target_on_a_lagging_plant(target, scale, slope, lag):
    """Live memories fall as a power of the weight and follow it late, as spans do in training."""
    controller = build(live=target, gain=0.05, max_weight=1e3)
    live = 1000.0
    for _ in range(1500):
        wanted = target * (float(controller.weight) / 10**scale) ** -slope
        live += (min(wanted, 2000.0) - live) / lag
        controller.update(torch.tensor(live), torch.tensor(1.0))
    assert live == pytest.approx(target, rel=0.05)


@given(st.floats(51, 1e6), st.floats(1e-6, 49))
@settings(max_examples=30, deadline=None)
def test_weight_rises_above_the_target_and_falls_below_it(high, low):
    up, down = build(), build()
    start = float(up.weight)
    assert feed(up, high) > start > feed(down, low)


def test_more_live_memories_never_lower_the_weight():
    weights = [feed(build(), live, times=5) for live in (1, 10, 50, 60, 200, 1e4)]
    assert weights == sorted(weights)


def test_limits_hold():
    high, low = build(max_weight=1e-3), build()
    assert feed(high, 1e9, times=2000) == pytest.approx(1e-3)
    assert feed(low, 0.0, times=2000) == pytest.approx(1e-8, rel=1e-4)
    far = build()
    before = float(far.weight)
    assert feed(far, 1e9) == pytest.approx(before * math.exp(far.config.gain * LARGEST_ERROR))


def test_waits_for_start_loss_and_never_stops_again():
    controller = build(start_loss=0.5)
    assert feed(controller, 500, loss=2.0, times=50) == 0
    assert feed(controller, 500, loss=0.1, times=100) > 0
    assert feed(controller, 500, loss=2.0, times=100) > 0


def test_one_lucky_step_does_not_start_it():
    controller = build(start_loss=0.5)
    feed(controller, 500, loss=2.0, times=50)
    assert feed(controller, 500, loss=0.0) == 0


@pytest.mark.parametrize(("memory", "steps"), [(5.0, 11), (20.0, 45)])
def test_the_span_loss_starts_as_soon_as_its_running_mean_allows(memory, steps):
    """From half of the episodes failed to none: the running share falls below 5% after memory x ln 10 steps."""
    config = BudgetConfig(live=50.0, start_loss=0.05)
    controller = BudgetController(config, layers=2, bytes_per_memory=100, loss_memory=memory)
    feed(controller, 500, loss=0.5, times=400)
    assert feed(controller, 500, loss=0.0, times=steps - 1) == 0
    assert feed(controller, 500, loss=0.0) > 0


def test_patience_shrinks_the_weight_while_the_task_suffers():
    controller = build(patience_loss=1.0)
    happy = feed(controller, 500, loss=0.5, times=20)
    assert feed(controller, 500, loss=3.0, times=40) < happy


def test_bytes_become_memories_per_layer():
    controller = BudgetController(BudgetConfig(bytes=10_000), layers=4, bytes_per_memory=50)
    assert controller.target == 50
    grouped = DecoderConfig.modern(dim=64, heads=8, kv_heads=2)  # keys and values of 2 heads of 8 numbers each
    assert memory_bytes(grouped, element=2) == 2 * 2 * 8 * 2


def test_restores_exactly():
    a, b = build(start_loss=0.9), build(start_loss=0.9)
    feed(a, 77.0, loss=0.7, times=13)
    b.load_state_dict(a.state_dict())
    assert feed(a, 31.0, loss=0.8, times=9) == feed(b, 31.0, loss=0.8, times=9)


def test_needs_a_target():
    with pytest.raises(ValueError, match="needs a target"):
        BudgetController(BudgetConfig(), layers=1, bytes_per_memory=1)


def test_the_span_loss_waits_for_a_number_of_steps():
    """However well the task goes; a state from before there was a wait has no step count."""
    controller = BudgetController(BudgetConfig(live=4, wait=3, start_loss=1.0), layers=1, bytes_per_memory=1)
    weights = []
    for _ in range(4):
        weights.append(float(controller.weight))
        controller.update(torch.tensor(8.0), torch.tensor(0.1))
    assert weights[:3] == [0, 0, 0] and weights[3] > 0
    controller.load_state_dict({"state": controller.state_dict()["state"][:4]})
    assert float(controller.weight) > 0
    with pytest.raises(ValueError, match="wait must be at least 0, got -1"):
        BudgetConfig(live=4, wait=-1)


def test_at_rest_nothing_presses_while_the_target_is_met_or_the_task_suffers():
    """A small weight would not do: divided by the root of its own square, as Adam does, a small gradient is as large as any."""
    controller = build(rest=True, patience_loss=0.2)
    assert feed(controller, 80.0, 0.1, 100) > 0
    assert feed(controller, 49.0, 0.1, 100) == 0
    assert feed(controller, 80.0, 0.1, 100) > 0
    assert feed(controller, 80.0, 0.3, 100) == 0
    other = build(rest=True, patience_loss=0.2)
    other.load_state_dict(controller.state_dict())
    assert float(other.weight) == 0
    assert feed(build(), 10.0, 0.1, 100) > 0
