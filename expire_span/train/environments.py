"""Many environments side by side: the interface that an agent's training and evaluation use.

The grid worlds of this package run as one batched engine, on the agent's device; everything else runs through Gymnasium's
vector API. A row is one environment. When its episode ends, the row begins its next one, which depends only on (seed, row,
number of the episode): so a run that continues after an interruption sees the same episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.settings.agent import EnvTask, ObservationField

PREVIOUS = "previous_action"
"""Name of the observation field that holds the last action, where the task shows it."""


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
    """Number of values of each of the K categorical choices that make an action."""
    observation: dict[str, Tensor]
    batched: bool = False
    """Whether all rows are stepped together, so that more of them cost little."""

    def __init__(self, task: EnvTask, count: int, device: torch.device) -> None:
        self.task, self.count, self.device = task, count, device

    def _finish_fields(self) -> None:
        """Add the last action to the observation, if the task asks for it; one additional value means "none yet"."""
        if self.task.previous_action:
            sizes = tuple(n + 1 for n in self.actions)
            self.fields = (*self.fields, ObservationField(PREVIOUS, "choices", (len(sizes),), sizes))

    def begin(self, seed: int) -> None:
        """Begin the first episode in every row, with this seed."""
        self._begin_all(seed)
        self.observation = self._show(self._observe(), None, None)

    def step(self, actions: Tensor) -> EnvironmentStep:
        """Take the actions [B, K]; rows whose episode ends begin the next one."""
        reward, terminated, truncated, success = self._advance(actions)
        ended = terminated | truncated
        final = self._show(self._observe(), actions, None) if bool(truncated.any()) else None
        if bool(ended.any()):
            self._begin_rows(ended)
        self.observation = self._show(self._observe(), actions, ended)
        return EnvironmentStep(reward, terminated, truncated, success, final)

    def _show(self, seen: dict[str, Tensor], actions: Tensor | None, ended: Tensor | None) -> dict[str, Tensor]:
        if not self.task.previous_action:
            return seen
        none = torch.tensor(self.actions, device=self.device).expand(self.count, -1)
        last = none if actions is None else actions
        return {**seen, PREVIOUS: last if ended is None else torch.where(ended[:, None], none, last)}

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


def to_tensor(x: Any, device: torch.device) -> Tensor:
    """A numpy array or tensor on the device, never sharing memory with an array that may be written again."""
    return (torch.from_numpy(np.array(x)) if not isinstance(x, Tensor) else x).to(device)
