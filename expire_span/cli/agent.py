"""Runs of agents on the command line: their part of train, resume, eval and compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expire_span.runs import RunFolder

from .parsing import warn

USUAL = (
    *("name", "task.env", "task.options", "mixer", "train.steps", "train.envs", "train.window", "train.lr"),
    *("train.imitate", "train.budget.live", "train.device", "seed", "init-from", "stage"),
)
"""Options of train that --help shows; --help-all shows all."""
USUAL_TO_COMPARE = ("task.env", "task.options", "train.steps", "train.envs", "train.device")
"""The same of compare, beside those of every kind of run."""


def evaluate(run: RunFolder, command: Any) -> dict[str, Any]:
    """The result of new episodes. command: the `Eval` of runs.py."""
    from expire_span.checkpoint import load_policy
    from expire_span.lab.controls import choose_control
    from expire_span.train.actor_critic import TEST, split_seed
    from expire_span.train.agent_evaluation import evaluate_agent
    from expire_span.train.devices import check_device

    config = run.config
    task = config.task if command.options is None else replace(config.task, options=command.options)
    policy = load_policy(run, check_device(command.device), warn)
    settings: dict[str, Any] = dict(seed=split_seed(config.seed, TEST), rows=config.train.envs)
    settings |= dict(greedy=command.greedy, control=choose_control(command.control))
    return evaluate_agent(policy, task, command.episodes, **settings).to_dict()


def tell(run: RunFolder, result: dict[str, Any]) -> str:
    """The result of a finished run in a sentence."""
    live = " ".join(f"{x:.1f}" for x in result["live"])
    interval = f" ({result['low']:.3f} to {result['high']:.3f})" if result["low"] is not None else ""
    gained = f", mean return {result['mean_return']:.3f}" if result["score_name"] != "return" else ""
    return (
        f"{run.name}: {result['score_name']} {result['score']:.4f}{interval}{gained} over {result['episodes']:,} fresh "
        f"episodes after {result['env_steps']:,} steps, live memories {live}, run folder {run.path}"
    )
