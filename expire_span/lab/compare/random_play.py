"""The score of random play in an environment: what every agent must be better than."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from expire_span.disk.files import read_json, to_json, write_atomic
from expire_span.models.policy import Policy
from expire_span.models.systems.sliding_window import SlidingWindowConfig
from expire_span.settings.run import AgentRunConfig
from expire_span.train.actor_critic import TEST, split_seed
from expire_span.train.agent_evaluation import evaluate_agent

EPISODES = 512
"""Episodes of random play."""


def random_score(folder: Path, config: AgentRunConfig) -> dict[str, Any]:
    """The score of random play, its name and its number of episodes; played once and kept in the folder."""
    file = folder / "random.json"
    if not file.exists():
        episodes = min(EPISODES, config.train.test_episodes)
        result = evaluate_agent(
            build_random(config), config.task, episodes, seed=split_seed(config.seed, TEST), rows=config.train.envs
        )
        told = {"score": result.score, "score_name": result.score_name, "episodes": result.episodes}
        write_atomic(file, to_json({**told, "return": result.mean_return}))
    return read_json(file)


def build_random(config: AgentRunConfig) -> Policy:
    """A policy that takes every choice with equal probability; continuous numbers are drawn as by an untrained agent."""
    with torch.random.fork_rng([]):
        policy = Policy(replace(config.model, layers=1, mixer=SlidingWindowConfig(window=1), partner=None, pattern=""))
    with torch.no_grad():
        policy.action_head.weight.zero_()
    return policy
