"""Evaluation of agents: intervals, bands, retention, and the control experiments."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.lab.controls import Delete, choose_control, choose_rows
from expire_span.models.policy import Policy
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.settings.agent import EnvTask, PolicyConfig
from expire_span.store import NEVER, trim_states
from expire_span.train.agent_evaluation import evaluate_agent, wilson
from expire_span.train.build_environments import build_environments
from expire_span.train.retention import RetentionCounter
from tests import tiny_agents  # noqa: F401 (registers Tiny/Echo-v0)

CORRIDOR = EnvTask(env="ExpireSpan/Corridor-Easy-v0", options='{"max_length": 14}')


def policy_of(task: EnvTask, **mixer: object) -> Policy:
    """An untrained policy for an environment."""
    envs = build_environments(task, 1)
    settings = ExpireSpanConfig(**{"max_span": 40, "ramp": 2, "initial_span": 0.9, **mixer})
    shape = dict(dim=16, layers=1, heads=2, ff_dim=16, positions="none", qk_norm=False)
    return Policy(PolicyConfig.modern(observation=envs.fields, actions=envs.actions, mixer=settings, **shape)).eval()


def test_wilson_intervals():
    """Known values: 10 of 10 and 0 of 10 are not certain, and 950 of 1000 is (0.935, 0.962)."""
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(950, 1000) == pytest.approx((0.9346, 0.9619), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_an_expert_scores_one_in_every_band(monkeypatch):
    """Episodes are counted whole and equally for each row; the expert needs just the steps that it is said to need."""
    policy = policy_of(CORRIDOR)
    monkeypatch.setattr(
        "expire_span.train.agent_evaluation.build_environments", lambda *a: obey_expert(build_environments(*a))
    )
    result = evaluate_agent(policy, CORRIDOR, 64, seed=5, rows=32)
    assert result.score == 1 and result.episodes == 64 and result.score_name == "success"
    assert [band.first for band in result.bands] == [1, 11] and [band.last for band in result.bands] == [10, 20]
    assert sum(band.episodes for band in result.bands) == 64 and all(band.success == 1 for band in result.bands)
    assert result.bands[0].low < 1 == result.bands[0].high
    # Spans of 36 and a ramp of 2 keep everything: all that was needed, and much else.
    assert result.retention.recall == 1 and 0.1 < result.retention.precision < 0.9
    assert all(band.live == pytest.approx((band.mean_steps + 1) / 2) for band in result.bands)
    assert result.live[0] > (result.mean_steps + 1) / 2  # long episodes have more steps to be counted at


def obey_expert(envs):
    """Environments in which the expert's action is taken, whatever the agent does."""
    step = envs.step
    envs.step = lambda actions: step(envs.facts()["optimal_action"].view(len(actions), -1))
    return envs


def test_an_episode_that_ends_without_success_has_failed():
    """Where the environment says nothing at the end of a lost episode, nor of one that was cut off, it is lost all the same."""
    task = EnvTask(env="Tiny/Echo-v0", options='{"tells": true}')
    result = evaluate_agent(policy_of(task), task, 60, seed=1, rows=3)
    assert result.score_name == "success" and result.score > 0
    assert (
        0 < result.mean_return - result.score < 0.06
    )  # 1 for a success, and less than 0.01 for each of at most six steps
    assert wilson(60 * result.score, 60) == pytest.approx((result.low, result.high))
    silent = EnvTask(env="Tiny/Echo-v0")
    assert evaluate_agent(policy_of(silent), silent, 6, seed=1, rows=3).score_name == "return"


def test_retention_by_hand():
    """Three memories of two facts in one episode of six steps, against counting step by step."""
    counter = RetentionCounter(policy_of(CORRIDOR), 1)
    counter.told = True
    counter.lives.append(torch.zeros(1, 1))
    # (fact, needed until, kept until), born at steps 0, 1, 2, 3, 4, 5
    counter.births[0] = [(0, 4, 1), (0, 4, 3), (-1, 2, 4), (1, 5, 9), (-1, 4, 4), (-1, 5, 6)]
    counter.end(0, 6, counts=True)
    result = counter.result()
    # Kept after birth: 1 + 2 + 2 + 2 + 0 + 0 = 7 steps, of which 1 + 2 + 0 + 2 = 5 were of use.
    assert result.precision == pytest.approx(5 / 7)
    # Fact 0 is of use at steps 1..4 and covered at 1..3; fact 1 is of use at 4 and 5 and covered at both.
    assert result.recall == pytest.approx(5 / 6)


# Controls


def test_deleting_what_shows_a_fact():
    """The control deletes only memories written at steps that showed a fact, and only once no step shows it any more."""
    policy = policy_of(CORRIDOR)
    envs = build_environments(CORRIDOR, 6)
    envs.begin(0)
    control, state = Delete(6, torch.device("cpu")), policy.initial_state(6)
    steps, showed = torch.zeros(6).long(), []
    for _ in range(7):  # the shortest corridors end at step 3, so rows are kept going by walking right only
        facts = envs.facts()
        state = control.change(state, steps, facts)
        memory = trim_states(state)[0]["memory"]
        for row in range(6):
            born = sorted((steps[row] + memory.pos[row])[memory.pos[row] != NEVER].tolist())
            hidden = facts["fact"][row] < 0
            assert born == [t for t in range(len(showed)) if not (hidden and showed[t][row])]
        showed.append((facts["fact"] >= 0).tolist())
        seen = {name: x.unsqueeze(1) for name, x in envs.observation.items()}
        state = policy(seen, state).state
        assert not envs.step(torch.ones(6, 1).long()).ended.any()
        steps += 1
    assert any(not all(row) for row in showed)


def test_rows_of_two_states_are_exchanged():
    policy = policy_of(CORRIDOR)
    envs = build_environments(CORRIDOR, 3)
    envs.begin(0)
    states, seen = [], {name: x.unsqueeze(1) for name, x in envs.observation.items()}
    for count in (2, 5):
        state = policy.initial_state(3)
        for _ in range(count):
            state = policy(seen, state).state
        states.append(trim_states(state))
    mixed = choose_rows(states[0], states[1], torch.tensor([True, False, True]))[0]["memory"]
    assert (mixed.pos != NEVER).sum(1).tolist() == [2, 5, 2]


@pytest.mark.parametrize("control", ["forget", "forget_expiring", "delete", "swap"])
def test_controls_play_on(control):
    """The twin's episodes stay in step with the agent's; with the control forget, the store holds only the newest memory."""
    policy = policy_of(CORRIDOR)
    result = evaluate_agent(policy, CORRIDOR, 8, seed=1, rows=4, control=choose_control(control))
    assert result.episodes == 8
    assert control != "forget" or result.peak_live == [1]


def test_controls_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="swap needs a corridor with two colours"):
        task = EnvTask(env="ExpireSpan/Corridor-Hard-v0")
        evaluate_agent(policy_of(task), task, 2, seed=0, control=choose_control("swap"))
