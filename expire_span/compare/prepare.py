"""Plans a comparison: the config of every run, with equal parameters. Nothing is written here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from expire_span.agent_configs import AgentRunConfig
from expire_span.config import RunConfig
from expire_span.memories import find_limits, state_bytes
from expire_span.models.systems import find
from expire_span.runs import UserError
from expire_span.tasks.contract import Split, Task
from expire_span.tasks.registry import build_task
from expire_span.train.build_environments import build_environments
from expire_span.train.devices import check_device
from expire_span.train.estimate import check_arithmetic, check_size, count_parameters, device_bytes
from expire_span.train.progress import show_bytes

from .matched import match_parameters
from .plan import Comparison, System, config_of

COPIES = 2.5
"""Peak bytes of a growing store per byte that it holds: it has spare slots, and is copied when it grows."""


def prepare(
    path: Path, recipe: str, base: RunConfig, systems: Sequence[System], train_seconds: float | None = None
) -> Comparison:
    """Check the data and the device, match every system's parameters, and refuse what cannot run."""
    if isinstance(base, AgentRunConfig):
        return _prepare_agents(path, recipe, base, systems, train_seconds)
    device = check_device(base.train.device)
    check_arithmetic(base, device)
    task = build_task(base.task)
    base = replace(base, model=replace(base.model, vocab=task.vocab))
    longest = _check_splits(task, base)
    target = count_parameters(base.model)
    parameters, runs = {"reference": target}, {}
    for system in systems:
        config = config_of(system, base)
        config = replace(config, model=match_parameters(config.model, target))
        check_size(config, device)
        check_memory(config, longest, device)
        runs[system.name] = (system, config)
        parameters[system.name] = count_parameters(config.model)
    return Comparison(path, recipe, base, train_seconds, asdict(task.score), parameters, runs)


def _prepare_agents(
    path: Path, recipe: str, base: AgentRunConfig, systems: Sequence[System], train_seconds: float | None
) -> Comparison:
    """The same for agents; the environment says what a policy reads and which actions it has."""
    check_device(base.train.device)
    envs = build_environments(base.task, 1)
    base = replace(base, model=replace(base.model, observation=envs.fields, actions=envs.actions))
    judged = envs.batched or base.task.success_return is not None
    envs.close()
    target = count_parameters(base.model)
    parameters, runs = {"reference": target}, {}
    for system in systems:
        config = config_of(system, base)
        config = replace(config, model=match_parameters(config.model, target))
        runs[system.name] = (system, config)
        parameters[system.name] = count_parameters(config.model)
    score = {"name": "success" if judged else "return", "higher_is_better": True}
    return Comparison(path, recipe, base, train_seconds, score, parameters, runs)


def _check_splits(task: Task, config: RunConfig) -> int:
    """Refuse splits that are too short; returns the largest number of tokens per row in an evaluation."""
    train = config.train
    task.stream("train", batch=train.batch, block=train.block, seed=config.seed)
    block, carried = train.eval_block or train.block, 0
    caps: dict[Split, int | None] = {"valid": train.eval_batches, "test": train.test_batches}
    for split, batches in caps.items():
        stream = task.stream(split, batch=train.eval_batch or train.batch, block=block, seed=config.seed)
        whole = getattr(stream, "longest", block)
        carried = max(carried, whole if batches is None else min(whole, batches * block))
    return carried


def check_memory(config: RunConfig, steps: int, device: torch.device) -> None:
    """Refuse a system whose memory would not fit on the device in the evaluation, before it is trained."""
    train = config.train
    kind = next((m.kind for m in config.model.mixers if not find(m.kind).bounded), None)
    if kind is None:
        return
    element = 2 if train.precision == "bf16" else 4
    need = COPIES * (train.eval_batch or train.batch) * state_bytes(config.model, steps, element)
    have = device_bytes(device)
    if need > have:
        raise UserError(
            f"{kind} never forgets: carried through {steps:,} steps of the evaluation it would need up to "
            f"{show_bytes(need)}, and {device} has {show_bytes(have)}; cap it with --train.test-batches "
            f"and --train.eval-batches, or give fewer rows with --train.eval-batch"
        )


def describe_plan(comparison: Comparison) -> str:
    """Every system with its parameters, and what it cannot do on this task, before anything is trained."""
    reference = comparison.parameters["reference"]
    lines = [f"recipe {comparison.recipe}: {reference:,} parameters; {len(comparison.runs)} runs in {comparison.path}"]
    seen: dict[str, str] = {}
    for name, (system, config) in comparison.runs.items():
        count = comparison.parameters[name]
        off, width = count / reference - 1, config.model.ff_dim
        line = f"  {system.label:<22}{count:>13,} parameters ({off:+.2%}), ff_dim {width}"
        seen.setdefault(system.label, "\n".join([line, *(f"    note: {limit}" for limit in find_limits(config))]))
    return "\n".join([*lines, *seen.values()])
