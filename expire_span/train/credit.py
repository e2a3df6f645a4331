"""How much of an action's credit comes from later rewards: as much as is seen to depend on the action.

An advantage is the sum of two parts: what the action's own step gave beyond what was expected there, and everything later.
Where an action changes nothing later, as an answer to a question, the later part is noise, and often several times larger than
the first. So each part is weighted by the fraction of its policy gradient that is signal. With the gradient g_b of every
environment b, taken at the head of the actions alone, and S = sum_b g_b,

    signal = |S|^2 - sum_b |g_b|^2   (the products of different environments, whose noise is independent)
    weight = signal / |S|^2          (averaged over updates, relative to the larger of both, at least `LEAST`)
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
"""Smallest weight of a part, so that effects that cannot be measured yet still count."""
RIDGE = 1e-3
"""Ridge of the regression of rewards, relative to the mean square of a feature."""


class CreditWeights:
    """The weights of the advantages' two parts: the reward of the step itself, and what is later."""

    def __init__(self, device: torch.device, merge: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        """merge: adds sums up over the processes that share the environments."""
        self.merge, self.updates = merge, 0
        self.sums = torch.zeros(2, 2, device=device)  # signal and size of each part, running

    def weigh(self, reward: Tensor, advantage: Tensor, features: Tensor, score: Tensor) -> Tensor:
        """The advantages [T, B] with both parts weighted.

        features [T, B, C]: what the head of the actions read. score [T, B, A]: the gradient of the log-probability of the
        actions taken, in terms of what that head gave.
        """
        now = reward - expected(reward, features)
        parts = torch.stack([now, advantage - now])
        self._note(parts - parts.mean((1, 2), keepdim=True), features, score)
        return (self.weights[:, None, None] * parts).sum(0)

    def _note(self, parts: Tensor, features: Tensor, score: Tensor) -> None:
        """Take a window's parts [2, T, B] into the running means."""
        inner = torch.einsum("ptb,tba,tbc->pbac", parts, score, features).flatten(2)  # each environment's gradient
        size = inner.sum(1).square().sum(-1)
        signal = size - inner.square().sum((1, 2))
        new = self.merge(torch.stack([signal, size]))
        self.updates += 1
        self.sums = MEMORY * self.sums + (1 - MEMORY) * new

    @property
    def weights(self) -> Tensor:
        """The weight of the reward of the step itself, and of what is later."""
        signal, size = self.sums
        share = signal.clamp_min(0) / size.clamp_min(torch.finfo(size.dtype).tiny)
        if self.updates < FIRST or not bool((share > 0).any()):
            return torch.ones_like(share)
        return (share / share.max()).clamp_min(LEAST)

    @property
    def later(self) -> Tensor:
        """The weight of what is later, in units of that of the step itself."""
        now, later = self.weights
        return later / now

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
