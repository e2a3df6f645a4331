"""Runs of agents on the command line: their part of train, resume and eval."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from expire_span.agent_configs import AgentRunConfig
from expire_span.errors import UserError
from expire_span.runs import RunFolder, check_name, check_new, find_run

from .parsing import PROGRAM, is_first_process, parse, warn


@dataclass(frozen=True)
class TrainAgent:
    """Train an agent; every field of it can be changed with an option."""

    config: Annotated[AgentRunConfig, tyro.conf.arg(name="")]
    name: str | None = None
    """Name of the run folder; the recipe's name by default."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    mixer: str | None = None
    """Memory system to take in place of the recipe's, with its default settings; see expire-span memories."""
    init_from: str | None = None
    """A run whose best weights are the initial weights: its name under --runs-dir, or its path. The shapes must match."""


USUAL = (
    "name",
    "task.env",
    "task.options",
    "mixer",
    "train.steps",
    "train.envs",
    "train.window",
    "train.lr",
    "train.imitate",
    "train.budget.live",
    "train.device",
    "seed",
    "init-from",
)
"""Options that --help shows; --help-all shows all."""


def train_agent(recipe: str, config: AgentRunConfig, args: list[str]) -> int:
    command = parse(TrainAgent, args, f"{PROGRAM} train {recipe}", TrainAgent(config), USUAL)
    if not command.config.task.env:
        raise UserError("train agent needs an environment; give --task.env, like ExpireSpan/Corridor-Easy-v0")
    name = command.name or recipe
    check_name(name)
    if is_first_process():
        check_new(command.runs_dir / name)
    from expire_span.train.actor_critic import train

    source = find_run(command.init_from, command.runs_dir) if command.init_from is not None else None
    return _finish(train(command.config, command.runs_dir / name, recipe=recipe, init_from=source))


def resume_agent(run: RunFolder) -> int:
    from expire_span.train.actor_critic import resume

    return _finish(resume(run))


def eval_agent(run: RunFolder, command: Any) -> int:
    """Print the result of new episodes as JSON. command: the `Eval` of runs.py."""
    from expire_span.checkpoint import load_policy
    from expire_span.train.actor_critic import TEST, split_seed
    from expire_span.train.agent_evaluation import evaluate_agent
    from expire_span.train.devices import check_device

    config: Any = run.config
    task = config.task if command.options is None else replace(config.task, options=command.options)
    policy = load_policy(run, check_device(command.device), warn)
    result = evaluate_agent(
        policy,
        task,
        command.episodes,
        seed=split_seed(config.seed, TEST),
        rows=config.train.envs,
        greedy=command.greedy,
        control=command.control,
    )
    print(json.dumps(result.to_dict(), indent=2))
    return 0


def _finish(run: RunFolder) -> int:
    """Print the result of a finished run."""
    result = run.read_result() or {}
    if is_first_process():
        live = " ".join(f"{x:.1f}" for x in result["live"])
        interval = f" ({result['low']:.3f} to {result['high']:.3f})" if result["low"] is not None else ""
        gained = f", mean return {result['mean_return']:.3f}" if result["score_name"] != "return" else ""
        print(
            f"{run.name}: {result['score_name']} {result['score']:.4f}{interval}{gained} over {result['episodes']:,} fresh "
            f"episodes after {result['env_steps']:,} steps, live memories {live}, run folder {run.path}"
        )
    return 0
