"""Agents of two kinds of layers: their names, replay, budget and controls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.lab.controls import choose_control
from expire_span.models.state import map_tensors
from expire_span.settings.run import AgentRunConfig
from expire_span.train.actor_critic import AgentLearner
from expire_span.train.replay import replay
from tests.tiny_agents import MIXER, play_twice, tiny_agent

pytestmark = pytest.mark.usefixtures("one_thread")

HYBRID = "gru+expire_span"


def hybrid(**train) -> AgentRunConfig:
    config = tiny_agent(**train)
    return replace(config, model=replace(config.model, layers=1).with_mixer(HYBRID))


def test_a_hybrid_by_its_name():
    """A layer of each in turn; what the recipe has keeps its settings, and one kind undoes a hybrid."""
    model = replace(tiny_agent().model, layers=1)
    made = model.with_mixer(HYBRID)
    assert [m.kind for m in made.mixers] == ["gru", "expire_span"] and made.mixer == MIXER
    assert [m.kind for m in model.with_mixer("2xlstm+expire_span").mixers] == ["lstm", "lstm", "expire_span"]
    assert made.with_mixer("expire_span") == replace(model, layers=2)
    assert replace(model, layers=5).with_mixer(HYBRID).layers == 5
    for wrong, words in (("gru+full+lstm", "a hybrid is of two"), ("2xgru", "of two"), ("0xgru+full", "at least one")):
        with pytest.raises(ValueError, match=words):
            model.with_mixer(wrong)
    with pytest.raises(ValueError, match="unknown mixer 'grou'"):
        model.with_mixer("grou+expire_span")


def test_a_hybrids_replay_equals_its_rollout():
    learner = play_twice(hybrid(window=16))
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    out = replay(learner.trained, window)
    for name in ("log_prob", "value"):
        played = getattr(window, name).flatten()[out.index]
        assert (getattr(out, name) - played).abs().max() < 1e-5, name


def test_the_budget_of_a_hybrid_counts_the_layers_that_learn_spans():
    """The recurrent layer always holds one vector, which no span loss can shorten."""
    learner = AgentLearner(hybrid(budget=replace(tiny_agent().train.budget, live=3.0)))
    assert learner.budgeted == [1]
    seen = []
    learner.budget.update = lambda live, loss: seen.append(float(live))
    learner.step(0)
    assert seen == [float(learner.rows[-1]["live"][1])]
    assert AgentLearner(tiny_agent(budget=replace(tiny_agent().train.budget, live=3.0))).budgeted == [0, 1]


def show_state(state) -> str:
    """All tensors of a layer's state, to be compared."""
    found = []
    map_tensors(state, lambda x: found.append(x.tolist()) or x)
    return repr(found)


def test_forgetting_one_kind_of_a_hybrids_layers():
    """forget_expiring empties the second layer alone, and forget_recurrent the first."""
    learner = play_twice(hybrid(window=16))
    state, steps = learner.player.state, torch.zeros(4).long()
    empty = learner.trained.reset_rows(state, torch.ones(4, dtype=torch.bool))

    wanted = {"forget": (True, True), "forget_expiring": (False, True), "forget_recurrent": (True, False)}
    for name, emptied in wanted.items():
        control = choose_control(name)(learner.trained, learner.config.task, 4, torch.device("cpu"), 0)
        changed = control.change(state, steps, {})
        for part, before, none, gone in zip(changed, state, empty, emptied):
            assert show_state(part) == show_state(none) if gone else part is before
            assert show_state(none) != show_state(before)
    with pytest.raises(ValueError, match="forget_recurrent needs recurrent layers, and this agent has none"):
        plain = AgentLearner(tiny_agent()).trained
        choose_control("forget_recurrent")(plain, learner.config.task, 4, torch.device("cpu"), 0)
