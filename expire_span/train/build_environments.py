"""The environments that a task asks for: our batched grid worlds, or any that Gymnasium knows."""

from __future__ import annotations

import torch

from expire_span.settings.agent import EnvTask

from .environments import Environments
from .gridworlds import GridWorlds


def build_environments(
    task: EnvTask, count: int, device: torch.device | str = "cpu", *, first: int = 0
) -> Environments:
    """`count` environments of a task. first: number of the first one, where the environments are split among processes."""
    device = torch.device(device)
    if not task.env:
        raise ValueError("an agent needs an environment; name one with --task.env, like ExpireSpan/Corridor-Easy-v0")
    if task.env.startswith("ExpireSpan/"):
        return GridWorlds(task, count, device, first)
    from .gymnasium_environments import GymnasiumEnvironments  # needs the extra rl

    return GymnasiumEnvironments(task, count, device, first)
