"""What is particular to comparisons of agents: their environment, and how the score is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from expire_span.settings.run import AgentRunConfig
from expire_span.train.build_environments import build_environments
from expire_span.train.devices import check_device


def survey(base: AgentRunConfig) -> tuple[AgentRunConfig, dict[str, Any], Callable[[Any], None]]:
    """The recipe with what the environment says a policy reads and does, the score, and a check that all pass."""
    check_device(base.train.device)
    envs = build_environments(base.task, 1)
    known = {"observation": envs.fields, "actions": envs.actions, "continuous": envs.continuous}
    base = replace(base, model=replace(base.model, **known))
    judged = envs.batched or base.task.success_return is not None
    envs.close()
    return base, {"name": "success" if judged else "return", "higher_is_better": True}, lambda config: None


def describe_length(config: AgentRunConfig) -> str:
    """How long each system is trained, where the recipe says it."""
    return f"{config.train.steps:,} updates of {config.train.envs} x {config.train.window} steps each"


def describe_score(config: AgentRunConfig, score: str, better: str) -> str:
    """On what the score is measured, and of what bytes are counted."""
    over = f"of the best weights over at least {config.train.test_episodes:,} fresh episodes in {config.task.env}"
    return f"{score} ({better} is better) {over}. Bytes are of one environment's memory over all layers."
