"""Many environments side by side: the interface that an agent's training and evaluation use.

The grid worlds of this package run as one batched engine, on the GPU where the agent is there; everything else runs through
Gymnasium's vector API. An episode that ends is followed at once by the next one of its row, whose draws depend only on (seed,
row, number of the episode): so a run that goes on after an interruption sees the very same episodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.agent_configs import EnvTask, ObservationField

PREVIOUS = "previous_action"
"""Name of the observation's field that holds the last action, where that is shown."""


@dataclass
class Frame:
    """What one step of every environment gives, [B] each."""

    reward: Tensor
    terminated: Tensor
    """The episode has ended by the environment's own rules."""
    truncated: Tensor
    """The episode was cut off, so that its value goes on."""
    success: Tensor
    """Of episodes that have just ended: 1, 0, or nan where the environment does not say."""
    final: dict[str, Tensor] | None
    """The last observations of the episodes that were cut off; None where there are none."""

    @property
    def ended(self) -> Tensor:
        return self.terminated | self.truncated


class Environments(ABC):
    """`count` environments. `observation` is what the agent sees now, each field [B, *shape] on the device."""

    fields: tuple[ObservationField, ...]
    actions: tuple[int, ...]
    """How many values each choice of an action has."""
    observation: dict[str, Tensor]
    batched: bool = False
    """Whether all rows are stepped together, so that more of them cost little."""

    def __init__(self, task: EnvTask, count: int, device: torch.device) -> None:
        self.task, self.count, self.device = task, count, device

    def _finish_fields(self) -> None:
        """Add the last action to what is seen, where the task wants it; one more value stands for "none yet"."""
        if self.task.previous_action:
            sizes = tuple(n + 1 for n in self.actions)
            self.fields = (*self.fields, ObservationField(PREVIOUS, "choices", (len(sizes),), sizes))

    def begin(self, seed: int) -> None:
        """Begin the first episode of a seed in every row."""
        self._begin_all(seed)
        self.observation = self._show(self._observe(), None, None)

    def step(self, actions: Tensor) -> Frame:
        """Act [B, K] everywhere; rows whose episode ends begin the next one."""
        reward, terminated, truncated, success = self._advance(actions)
        ended = terminated | truncated
        final = self._show(self._observe(), actions, None) if bool(truncated.any()) else None
        if bool(ended.any()):
            self._begin_rows(ended)
        self.observation = self._show(self._observe(), actions, ended)
        return Frame(reward, terminated, truncated, success, final)

    def _show(self, seen: dict[str, Tensor], actions: Tensor | None, ended: Tensor | None) -> dict[str, Tensor]:
        if not self.task.previous_action:
            return seen
        none = torch.tensor(self.actions, device=self.device).expand(self.count, -1)
        last = none if actions is None else actions
        return {**seen, PREVIOUS: last if ended is None else torch.where(ended[:, None], none, last)}

    @abstractmethod
    def facts(self) -> dict[str, Tensor]:
        """Facts about the present observation that the agent does not get: optimal_action, oracle_steps, needed_until, fact."""

    @abstractmethod
    def state_dict(self) -> Any:
        """What `load_state_dict` needs to stand where these environments stand now."""

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
