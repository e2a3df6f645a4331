"""Agents: experts and environments that do wrong are told of in one sentence, and splits share no episodes."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gymnasium")

from expire_span.checkpoint import load_model
from expire_span.runs import RunError, UserError
from expire_span.settings.agent import EnvTask
from expire_span.train import actor_critic
from expire_span.train.actor_critic import TEST, VALID, AgentLearner, train
from tests.tiny_agents import CORRIDOR, tiny_agent

pytestmark = pytest.mark.usefixtures("one_thread")


def refuse(match: str, env: str, **task) -> None:
    with pytest.raises(ValueError, match=match):
        AgentLearner(tiny_agent(env, task))


def test_bad_environments_are_refused():
    refuse(
        "unknown environment 'ExpireSpan/Coridor-Easy-v0'; did you mean ExpireSpan/Corridor-Easy-v0",
        "ExpireSpan/Coridor-Easy-v0",
    )
    refuse("environment 'Nothing-v0' cannot be made", "Nothing-v0")
    refuse("cannot be imported", "no_such_module:Thing-v0")
    refuse("name one with --task.env", "")
    refuse("do not fit ExpireSpan/Corridor-Easy-v0", CORRIDOR, options='{"colour": 3}')
    refuse("do not fit Tiny/Echo-v0", "Tiny/Echo-v0", options='{"colour": 3}')
    refuse("colours must lie in 2..5", CORRIDOR, options='{"colours": 9}')
    with pytest.raises(ValueError, match="must be a JSON table of arguments, got '\\[1\\]'"):
        EnvTask(options="[1]")


@pytest.mark.parametrize(
    ("env", "options"), [(CORRIDOR, '{"max_length": 3}'), ("Tiny/Echo-v0", "{}"), ("Tiny/Echo-v0", '{"multi": true}')]
)
def test_the_expert_acts_in_its_rows_and_is_recorded_in_all(env, options):
    """Its action is one of the environment's space, which may begin at another number than 0 or have several choices."""
    learner = AgentLearner(tiny_agent(env, {"options": options}))
    rows = learner.player.envs.count
    played = learner.player.play(12, gamma=0.9, gae_lambda=0.8, expert_rows=rows // 2)
    same = (played.window.actions == played.window.expert).all(-1)  # [T, B]
    assert bool(same[:, : rows // 2].all()) and not bool(same[:, rows // 2 :].all())
    learner = AgentLearner(tiny_agent(env, {"options": options}, imitate=2))
    learner.step(0)
    assert learner.metrics()["imitation_loss"] > 0


def test_an_expert_outside_of_the_action_space():
    learner = AgentLearner(tiny_agent(imitate=1))
    learner.player.envs.infos["optimal_action"] += 3  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"optimal_action of environment Tiny/Echo-v0 must be an action of Discrete\(3"):
        learner.step(0)


def test_no_two_splits_share_their_episodes():
    seeds = [actor_critic.split_seed(seed, split) for seed in range(20) for split in (0, VALID, TEST)]
    assert len(set(seeds)) == 60


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("make", r"Tiny/Broken-v0 failed in its making with KeyError: 'nothing there' \(tiny_agents.py, line \d+\)"),
        ("empty", r"observation value must hold at least one number, got the shape \(0,\)"),
        ("reset", r"Tiny/Broken-v0 failed in reset with RuntimeError: no reset today \(tiny_agents.py, line \d+\)"),
        ("step", r"Tiny/Broken-v0 failed in step with SystemExit: 3 \(tiny_agents.py, line \d+\)"),
        ("nan", "the observation clock of environment Tiny/Broken-v0 must be finite, got nan"),
        ("shape", r"the observation clock of environment Tiny/Broken-v0 must have the shape \(2,\) .*, got \(1,\)"),
        ("parts", r"the observation value of .* must have the parts \['clock', 'number'\] .*, got \['number'\]"),
        ("kind", "the observation value of environment Tiny/Broken-v0 must have a dict, got ndarray"),
        ("hang", "environment Tiny/Broken-v0 has not answered for 0.5 s in step; .* expire-span resume continues"),
        ("range", "the observation number of environment Tiny/Broken-v0 must lie in 1..4, got 9"),
        ("reward", "the reward of environment Tiny/Broken-v0 must be finite, got inf"),
        ("success", "Tiny/Broken-v0 failed in its report of success with ValueError: could not convert"),
        ("never", "no episode of Tiny/Broken-v0 has ended after 50 steps .*max_episode_steps"),
    ],
)
def test_what_environments_do_wrong_is_one_sentence(monkeypatch, wrong, words):
    monkeypatch.setattr("expire_span.train.agent_evaluation.MOST_STEPS", 50)
    patience = 0.5 if wrong == "hang" else 300.0
    config = tiny_agent("Tiny/Broken-v0", {"options": json.dumps({"wrong": wrong}), "patience": patience}, steps=1)
    with pytest.raises((UserError, RunError), match=words):
        learner = AgentLearner(config)
        learner.step(0)
        learner.evaluate()


def test_imitation_needs_an_expert():
    config = tiny_agent("CartPole-v1", imitate=1)
    with pytest.raises(ValueError, match="imitation needs an expert, and CartPole-v1 has none"):
        AgentLearner(config).step(0)


def test_an_agents_run_is_not_read_as_text(tmp_path):
    run = train(tiny_agent(steps=1), tmp_path / "run", shown=False)
    with pytest.raises(UserError, match="is an agent's, which reads no tokens"):
        load_model(run)
