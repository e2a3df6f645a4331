"""The environments that a task asks for: our batched grid worlds, or any that Gymnasium knows."""

from __future__ import annotations

from dataclasses import replace

import torch

from expire_span.settings.agent import EnvTask

from .environments import Environments
from .gridworlds import GridWorlds


def build_environments(
    task: EnvTask, count: int, device: torch.device | str = "cpu", *, first: int = 0
) -> Environments:
    """`count` environments of a task. first: number of the first one, where the environments are split among processes."""
    device, task = torch.device(device), decide_inputs(task)[0]
    if not task.env:
        raise ValueError("an agent needs an environment; name one with --task.env, like ExpireSpan/Corridor-Easy-v0")
    if task.env.startswith("ExpireSpan/"):
        return GridWorlds(task, count, device, first)
    from .gymnasium_environments import GymnasiumEnvironments  # needs the extra rl

    return GymnasiumEnvironments(task, count, device, first)


def decide_inputs(task: EnvTask) -> tuple[EnvTask, str]:
    """The task with what the agent sees decided, and a sentence on why; empty where the settings say it themselves."""
    if task.previous_action is not None:
        return task, ""
    name = task.env.rpartition(":")[2]
    if name.startswith("popgym-"):
        why = "the agent sees its last action, as in popgym's own baselines, since some of its tasks cannot be played without"
        return replace(task, previous_action=True), f"{why}; --task.previous-action False hides it"
    why = "the agent does not see its last action, so that it must remember by its memory and not by what it does"
    return replace(task, previous_action=False), f"{why}; --task.previous-action True shows it"
