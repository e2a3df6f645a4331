"""What agents see and do beside the environment's own spaces: the clock of an episode, and choices that are made as one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.settings.agent import EnvTask
from expire_span.train.actor_critic import AgentLearner
from expire_span.train.build_environments import build_environments
from expire_span.train.environments import CLOCK, PERIODS
from tests.tiny_agents import CORRIDOR, tiny_agent

pytestmark = pytest.mark.usefixtures("one_thread")


def read_clock(shown: torch.Tensor) -> list[int]:
    """The steps that a clock [B, 2 * periods] shows, from its longest period."""
    sine, cosine = shown[:, len(PERIODS) - 1], shown[:, -1]
    return (torch.atan2(sine, cosine) / (2 * torch.pi) * PERIODS[-1]).round().long().tolist()


@pytest.mark.parametrize("env", ["Tiny/Echo-v0", CORRIDOR])
def test_the_clock_counts_the_steps_of_each_episode(env):
    options = '{"max_length": 3}' if env == CORRIDOR else "{}"
    envs = build_environments(EnvTask(env=env, clock=True, options=options), 6)
    envs.begin(0)
    steps, seen = [0] * 6, 0
    for _ in range(40):
        assert read_clock(envs.observation[CLOCK]) == steps
        out = envs.step(torch.randint(envs.actions[0], (6, 1)))
        if out.final is not None:  # the final observation is of the step at which the episode was cut off
            shown = read_clock(out.final[CLOCK])
            assert all(shown[n] == steps[n] + 1 for n in out.truncated.nonzero().flatten().tolist())
            seen += 1
        steps = [0 if over else n + 1 for n, over in zip(steps, out.ended.tolist())]
    assert (seen or env == CORRIDOR) and max(steps) > 0


def test_choices_with_few_combinations_are_made_as_one():
    """Every combination reaches the environment as itself, and an expert's action is found among them."""
    task: dict[str, Any] = {"env": "Tiny/Echo-v0", "options": '{"multi": true}'}
    envs = build_environments(EnvTask(**task, joint_actions=6, previous_action=True), 6)
    assert envs.actions == (6,) and envs.width == 1
    assert build_environments(EnvTask(**task, joint_actions=5), 1).actions == (3, 2)
    envs.begin(0)
    given = envs.layout.give(torch.arange(6).unsqueeze(1).numpy())  # type: ignore[attr-defined]
    assert given.tolist() == [[n // 2, n % 2] for n in range(6)]
    expert = envs.facts()["optimal_action"]
    assert torch.equal(expert[:, 0] % 2, torch.ones(6).long()) and expert.shape == (6, 1)
    envs.step(torch.arange(6).unsqueeze(1))
    shown = envs.observation["previous_action"]
    assert ((shown[:, 0] == torch.arange(6)) | (shown[:, 0] == 6)).all()
    with pytest.raises(ValueError, match="joint_actions must be at least 1, got 0"):
        EnvTask(joint_actions=0)


def test_weighed_credit_changes_only_advantages():
    windows = []
    for weighed in (True, False):
        learner = AgentLearner(tiny_agent(weigh_credit=weighed))
        torch.manual_seed(0)
        windows.append(learner.player.play(8, gamma=0.9, gae_lambda=0.8).window)
    one, two = windows
    assert torch.equal(one.actions, two.actions) and torch.equal(one.target, two.target)
    torch.testing.assert_close(one.advantage, two.advantage)  # weights are 1 at first
