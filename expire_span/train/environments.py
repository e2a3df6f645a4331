"""Many environments side by side: the interface that an agent's training and evaluation use.

The grid worlds of this package run as one batched engine, on the agent's device; everything else runs through Gymnasium's
vector API. A row is one environment. When its episode ends, the row begins its next one, which depends only on (seed, row,
number of the episode): so a run that continues after an interruption sees the same episodes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.errors import UserError
from expire_span.settings.agent import EnvTask, ObservationField

PREVIOUS = "previous_action"
"""Name of the observation field that holds the choices of the last action, where the task shows it."""
PREVIOUS_NUMBERS = "previous_numbers"
"""Name of the field that holds the last action's continuous numbers, squashed; 0 where there is none yet."""
PREVIOUS_REWARD = "previous_reward"
"""Name of the field that holds the reward of the last step, where the task shows it; 0 where there is none yet."""

CLOCK = "episode_steps"
"""Name of the field that tells how many steps the episode has lasted, where the task shows it."""
PERIODS = tuple(4 << n for n in range(10))
"""Periods of the clock's sines and cosines, in steps."""


@dataclass
class EnvironmentStep:
    """What one step of B environments returns; each tensor is [B]."""

    reward: Tensor
    terminated: Tensor
    """The episode has ended by the environment's own rules."""
    truncated: Tensor
    """The episode was cut off by a limit, so that its final state still has a value."""
    success: Tensor
    """For episodes that have just ended: 1, 0, or NaN while the environment has not reported success in any episode."""
    final: dict[str, Tensor] | None
    """The final observations of truncated episodes, to compute that value; None if no episode was truncated."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class Environments(ABC):
    """`count` environments (B). `observation` is what the agent sees now, each field [B, *shape] on the device."""

    fields: tuple[ObservationField, ...]
    actions: tuple[int, ...]
    """Number of values of each of the categorical choices that make an action."""
    continuous: tuple[bool, ...] = ()
    """For each continuous number that follows the choices in an action, whether its range is bounded."""
    observation: dict[str, Tensor]
    batched: bool = False
    """Whether all rows are stepped together, so that more of them cost little."""

    def __init__(self, task: EnvTask, count: int, device: torch.device) -> None:
        self.task, self.count, self.device = task, count, device
        self.reward = torch.zeros(count, device=device)  # of the last step
        self.steps = torch.zeros(count, dtype=torch.long, device=device)  # that each row's episode has lasted

    @property
    def width(self) -> int:
        """Number of choices and continuous numbers of an action (K)."""
        return len(self.actions) + len(self.continuous)

    def _finish_fields(self) -> None:
        """Add the last action and reward to the observation, if the task asks for them; one additional value of a choice
        means "none yet"."""
        more = []
        if self.task.previous_action and self.actions:
            sizes = tuple(n + 1 for n in self.actions)
            more.append(ObservationField(PREVIOUS, "choices", (len(sizes),), sizes))
        if self.task.previous_action and self.continuous:
            more.append(ObservationField(PREVIOUS_NUMBERS, "numbers", (len(self.continuous),)))
        if self.task.previous_reward:
            more.append(ObservationField(PREVIOUS_REWARD, "numbers", ()))
        if self.task.clock:
            more.append(ObservationField(CLOCK, "numbers", (2 * len(PERIODS),)))
        self.fields = (*self.fields, *more)

    def keep_fields(self, fields: tuple[ObservationField, ...]) -> None:
        """Describe observations by the fields with which a run was trained; an environment that has changed is refused."""
        theirs, ours = ([(f.name, f.shape) for f in given] for given in (fields, self.fields))
        if theirs != ours:
            raise UserError(
                f"the observations of environment {self.task.env} have changed: trained with {theirs}, got {ours}"
            )
        self.fields = fields

    def begin(self, seed: int) -> None:
        """Begin the first episode in every row, with this seed."""
        self._begin_all(seed)
        self.steps = torch.zeros_like(self.steps)
        self.observation = self._show(self._observe(), None, None)

    def step(self, actions: Tensor, cut: Tensor | None = None) -> EnvironmentStep:
        """Take the actions [B, K]; rows whose episode ends, or is cut off in `cut` [B] (bool), begin the next one."""
        reward, terminated, truncated, success = self._advance(actions)
        truncated = truncated if cut is None else truncated | cut & ~terminated
        ended, self.reward, self.steps = terminated | truncated, reward, self.steps + 1
        final = self._show(self._observe(), actions, None) if bool(truncated.any()) else None
        if bool(ended.any()):
            self._begin_rows(ended)
            self.steps = self.steps.masked_fill(ended, 0)
        self.observation = self._show(self._observe(), actions, ended)
        return EnvironmentStep(reward, terminated, truncated, success, final)

    def _show(self, seen: dict[str, Tensor], actions: Tensor | None, ended: Tensor | None) -> dict[str, Tensor]:
        """What the agent sees: the observation, and the last action and reward except where an episode begins.

        actions [B, K]: the last ones; None at the first step of all rows. ended [B]: rows at their first step; None: none is.
        """
        shown = dict(seen)
        keep = lambda x, none: none if actions is None else x if ended is None else torch.where(ended, none, x)  # noqa: E731
        if self.task.previous_action:
            count = len(self.actions)
            last = torch.zeros(self.count, self.width) if actions is None else actions
            none = [torch.tensor(n, device=self.device).expand(self.count) for n in self.actions]
            choices = [keep(last[:, n].long(), none[n]) for n in range(count)]
            numbers = [
                keep(_squash(last[:, n], b), self.reward * 0) for n, b in enumerate(self.continuous, start=count)
            ]
            shown |= {PREVIOUS: torch.stack(choices, 1)} if choices else {}
            shown |= {PREVIOUS_NUMBERS: torch.stack(numbers, 1)} if numbers else {}
        if self.task.previous_reward:
            shown[PREVIOUS_REWARD] = keep(self.reward.float(), self.reward.float() * 0)
        if self.task.clock:
            shown[CLOCK] = _read_clock(self.steps)
        return shown

    @abstractmethod
    def facts(self) -> dict[str, Tensor]:
        """Facts about the current observation that the agent does not see: optimal_action [B] or [B, K], its choices counted
        from 0; oracle_steps, needed_until and fact, [B] each. An environment may report any of them or none."""

    @abstractmethod
    def state_dict(self) -> Any:
        """Plain values from which `load_state_dict` restores these environments exactly."""

    @abstractmethod
    def load_state_dict(self, state: Any) -> None: ...

    @abstractmethod
    def _begin_all(self, seed: int) -> None: ...

    @abstractmethod
    def _begin_rows(self, rows: Tensor) -> None: ...

    @abstractmethod
    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Reward, terminated, truncated, success; each [B]."""

    @abstractmethod
    def _observe(self) -> dict[str, Tensor]: ...

    def close(self) -> None:  # noqa: B027 (most environments hold nothing)
        """Release resources outside this process."""


def _read_clock(steps: Tensor) -> Tensor:
    """Numbers of steps [B] as sines and cosines [B, 2 * periods]; the same number is the same place of every period."""
    angle = 2 * math.pi * (steps.unsqueeze(-1) % steps.new_tensor(PERIODS)) / steps.new_tensor(PERIODS)
    return torch.cat([angle.sin(), angle.cos()], -1)


def _squash(x: Tensor, bounded: bool) -> Tensor:
    return x.float().tanh() if bounded else x.float()


def to_tensor(x: Any, device: torch.device) -> Tensor:
    """A numpy array or tensor on the device, never sharing memory with an array that may be written again."""
    return (torch.from_numpy(np.array(x)) if not isinstance(x, Tensor) else x).to(device)
