"""Rewards in units of the standard deviation of the discounted return, so that learning does not depend on their unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LARGEST = 10.0
"""Scaled rewards are cut off here: a first reward after many steps without one would be as large as the spread is small."""


class RewardScale:
    """Running spread of g_t = gamma g_t-1 + r_t over all steps of all environments, with g = 0 where an episode begins."""

    def __init__(self, rows: int, device: torch.device, merge: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """merge: adds sums up over the processes that share the environments."""
        self.running = torch.zeros(rows, device=device)
        self.sums = torch.zeros(3, dtype=torch.float64)  # how many, their sum, the sum of their squares
        self.merge = merge

    def update(self, reward: Tensor, ended: Tensor, gamma: float) -> None:
        """Take a window's rewards and ends of episodes, [T, B] each, into the spread."""
        seen = []
        for now, over in zip(reward, ended):
            self.running = gamma * self.running + now
            seen.append(self.running.double())
            self.running = self.running.masked_fill(over, 0)
        all_of = torch.stack(seen)
        new = torch.stack([all_of.new_tensor(all_of.numel()), all_of.sum(), all_of.square().sum()])
        self.sums = self.sums + self.merge(new).cpu()

    @property
    def factor(self) -> float:
        """What rewards are multiplied by; 1 as long as all were the same."""
        count, total, squares = self.sums.tolist()
        variance = squares / count - (total / count) ** 2 if count else 0.0
        return variance**-0.5 if variance > 1e-12 else 1.0

    def scaled(self, reward: Tensor) -> Tensor:
        return (reward * self.factor).clamp(-LARGEST, LARGEST)

    def state_dict(self) -> dict[str, Any]:
        return {"running": self.running, "sums": self.sums}

    def load_state_dict(self, state: dict[str, Any], move: Callable[[Any], Any]) -> None:
        self.running, self.sums = move(state["running"]), state["sums"].cpu()
