"""Agents learn what they must remember, and act by it: short with a tiny environment, long with the recipes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("gymnasium")

from expire_span.checkpoint import load_policy
from expire_span.lab.controls import choose_control
from expire_span.recipes.agents import agent_corridor_tiny, agent_repeat_previous_tiny
from expire_span.train.actor_critic import AgentLearner, train
from expire_span.train.agent_evaluation import evaluate_agent
from tests.tiny_agents import tiny_agent


def test_a_number_is_remembered():
    """Far above the chance of one in three, to which the agent falls when its memory is emptied at every step."""
    task = {"options": '{"longest": 4, "limit": 9}', "success_return": 0.5}
    config = tiny_agent(task=task, steps=30, envs=32, window=16, epochs=4, lr=1e-2, entropy=0.02)
    mixer = replace(config.model.mixer, max_span=20, initial_span=0.9)
    learner = AgentLearner(replace(config, model=replace(config.model, dim=32, layers=1, mixer=mixer)))
    for index in range(30):
        learner.step(index)
    scores = {
        name: evaluate_agent(learner.trained, learner.config.task, 256, seed=9, control=choose_control(name)).score
        for name in ("none", "forget")
    }
    assert scores["none"] > 0.75 and scores["forget"] < 0.55, scores


@pytest.mark.long
def test_corridor_easy_and_its_controls(tmp_path):
    """At least 95%, by the memory of the cue and nothing else: without it chance, with the other cue the other door."""
    run = train(agent_corridor_tiny(), tmp_path / "run", shown=False)
    result = run.read_result()
    assert result["score"] >= 0.95 and all(band["success"] >= 0.95 for band in result["bands"]), result
    policy, task = load_policy(run), replace(run.config.task, options='{"min_length": 10}')
    for control, low, high in (("forget", 0.4, 0.6), ("delete", 0.4, 0.6), ("swap", 0.0, 0.1)):
        assert low <= evaluate_agent(policy, task, 512, seed=9, control=choose_control(control)).score <= high, control


@pytest.mark.long
def test_popgym_repeat_previous(tmp_path):
    """A card of three steps ago: a perfect return is 1."""
    pytest.importorskip("popgym")
    config = agent_repeat_previous_tiny()
    run = train(replace(config, train=replace(config.train, steps=100)), tmp_path / "run", shown=False)
    assert run.read_result()["mean_return"] >= 0.95
