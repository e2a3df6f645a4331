"""Rewards for what is new in an episode: whom they are given, and that they stay out of returns."""

from __future__ import annotations

import torch

from expire_span.train.actor_critic import AgentLearner
from expire_span.train.environments import CLOCK, PREVIOUS
from expire_span.train.novelty import Novelty
from tests.tiny_agents import tiny_agent


def test_what_is_new_in_its_episode_earns_once():
    novelty = Novelty(2)
    novelty.weight = 0.5
    steps = [  # what both rows see, whether their episode begins, what they earn
        ((1, 1), (True, True), (0.0, 0.0)),
        ((1, 2), (False, False), (0.0, 0.5)),
        ((3, 1), (False, False), (0.5, 0.0)),
        ((3, 2), (False, True), (0.0, 0.0)),  # the second row has begun anew
        ((1, 1), (False, False), (0.0, 0.5)),
    ]
    for time, (seen, begins, earned) in enumerate(steps):
        observation = {"value": torch.tensor(seen), CLOCK: torch.full((2, 3), time), PREVIOUS: torch.full((2, 1), time)}
        if time == 3:  # restored in the middle
            other = Novelty(2)
            other.weight = 0.5
            other.load_state_dict(novelty.state_dict())
            novelty = other
        assert novelty.judge(observation, torch.tensor(begins)).tolist() == list(earned)


def test_it_is_learned_from_and_not_reported():
    """The same steps with and without: targets differ by the discounted rewards for what was new, returns do not."""
    task = {"options": '{"longest": 30, "limit": 20, "tells": true}', "clock": True}
    windows, returns = [], []
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        learner = AgentLearner(tiny_agent(task=task, novelty=weight))
        if learner.player.novelty is not None:
            learner.player.novelty.weight = weight
        torch.manual_seed(0)
        played = learner.player.play(25, gamma=0.5, gae_lambda=1.0)
        windows.append(played.window)
        returns.append(played.episodes)
    assert vars(returns[0]) == vars(returns[1])
    assert torch.equal(windows[0].actions, windows[1].actions)
    more = windows[1].target - windows[0].target
    assert (more >= -1e-6).all() and 0.5 < float(more.max()) < 2.0
