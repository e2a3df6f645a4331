"""How much of an action's credit comes from later rewards: as much as is seen to depend on the action.

An advantage is the sum of two parts: what the action's own step gave beyond what was expected there, and everything later.
Where an action changes nothing later, as an answer to a question, the later part is noise, and often several times larger than
the first. So the later part is weighted by how much of its policy gradient is signal, compared with the first part. With the
gradient g_b of every environment b, taken at the head of the actions alone, and S = sum_b g_b, for each part

    signal = |S|^2 - sum_b |g_b|^2   (the products of different environments, whose noise is independent)
    share = signal / |S|^2           (of sums over past updates)
    weight of the later part = share of the later part / share of the first, between `LEAST` and 1

The first part keeps its weight: where rewards come late it is zero, and the weights do not matter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MEMORY = 0.95
"""Decay of the running means of signal and size, per update."""
FIRST = 10
"""Updates in which both parts weigh the same, since the running means are not yet reliable."""
LEAST = 0.2
"""Smallest weight of the later part, so that effects that cannot be measured yet still count."""
NOTABLE = 0.1
"""A share below this may be chance, and is not what the other one is compared with."""
RIDGE = 1e-3
"""Ridge of the regression of rewards, relative to the mean square of a feature."""


class CreditWeights:
    """The weight of what is later in advantages, next to the reward of the step itself."""

    def __init__(self, device: torch.device, merge: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """merge: adds sums up over the processes that share the environments."""
        self.merge, self.updates = merge, 0
        self.sums = torch.zeros(2, 2, device=device)  # signal and size of each part, running

    def weigh(self, reward: Tensor, advantage: Tensor, features: Tensor, score: Tensor) -> Tensor:
        """The advantages [T, B] with their later part weighted.

        features [T, B, C]: what the head of the actions read. score [T, B, A]: the gradient of the log-probability of the
        actions taken, in terms of what that head gave.
        """
        now = reward - expected(reward, features)
        parts = torch.stack([now, advantage - now])
        self._note(parts - parts.mean((1, 2), keepdim=True), features, score)
        return parts[0] + self.later * parts[1]

    def _note(self, parts: Tensor, features: Tensor, score: Tensor) -> None:
        """Take a window's parts [2, T, B] into the running means."""
        inner = torch.einsum("ptb,tba,tbc->pbac", parts, score, features).flatten(2)  # each environment's gradient
        size = inner.sum(1).square().sum(-1)
        signal = size - inner.square().sum((1, 2))
        new = self.merge(torch.stack([signal, size]))
        self.updates += 1
        self.sums = MEMORY * self.sums + (1 - MEMORY) * new

    @property
    def shares(self) -> Tensor:
        """The share of signal in the gradients of both parts [2], at least 0."""
        signal, size = self.sums
        return signal.clamp_min(0) / size.clamp_min(torch.finfo(size.dtype).tiny)

    @property
    def later(self) -> Tensor:
        """The weight of the later part."""
        now, later = self.shares
        if self.updates < FIRST:
            return torch.ones_like(later)
        return (later / now.clamp_min(NOTABLE)).clamp(LEAST, 1)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any], move: Callable[[Any], Any]) -> None:
        self.sums, self.updates = move(state["sums"]), state["updates"]


def expected(reward: Tensor, features: Tensor) -> Tensor:
    """The reward [T, B] as a linear function of the features [T, B, C], by ridge regression over the window."""
    x = torch.cat([features, torch.ones_like(features[..., :1])], -1).flatten(0, 1).double()
    square = x.T @ x
    ridge = RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=x.dtype, device=x.device)
    solved = torch.linalg.solve(square + ridge, x.T @ reward.flatten().double())
    return (x @ solved).view_as(reward).to(reward.dtype)


class HeadWatch:
    """What a head read in its newest call, until `close`."""

    read: Tensor

    def __init__(self, head: nn.Module) -> None:
        self.hook = head.register_forward_hook(self._note)

    def _note(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        self.read = given[0]

    def close(self) -> None:
        self.hook.remove()
