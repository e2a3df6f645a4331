"""Distributions of actions: independent choices, continuous numbers, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LEAST_LOG, MOST_LOG = -5.0, 1.0
"""Range of the logarithm of a number's standard deviation."""
NODES = 16
"""Nodes of the quadrature by which the entropy of squashed numbers is computed."""


class Choices:
    """Independent categorical choices, one for each size: the distribution of an action. logits [.., sum(sizes)]."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.parts = [part.log_softmax(-1) for part in logits.float().split(list(sizes), -1)]

    def sample(self) -> Tensor:
        """Draws [.., K] from torch's global generator."""
        return torch.stack([_draw(part) for part in self.parts], -1)

    def likeliest(self) -> Tensor:
        return torch.stack([part.argmax(-1) for part in self.parts], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log probability of actions [.., K], summed over the K choices: [..]."""
        picked = [part.gather(-1, a.unsqueeze(-1)).squeeze(-1) for part, a in zip(self.parts, actions.unbind(-1))]
        return torch.stack(picked).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([-(part.exp() * part).sum(-1) for part in self.parts]).sum(0)

    def score(self, actions: Tensor) -> Tensor:
        """The gradient of the log probability of actions [.., K] in the logits: [.., sum(sizes)]."""
        given = zip(self.parts, actions.unbind(-1))
        return torch.cat([torch.zeros_like(p).scatter(-1, a.unsqueeze(-1), 1) - p.exp() for p, a in given], -1)


def _draw(log_probs: Tensor) -> Tensor:
    """The first value whose cumulative probability exceeds a uniform draw: one random number for each choice."""
    share = torch.rand(log_probs.shape[:-1], device=log_probs.device).unsqueeze(-1)
    return (log_probs.exp().cumsum(-1) <= share).sum(-1).clamp_max(log_probs.shape[-1] - 1)


class Numbers:
    """Independent normal numbers u, where the environment gets tanh(u), in the unit of its range, if the range is bounded.

    An action is u itself: the ratio of two probabilities of the same action is then the same for u and for tanh(u), and no
    logarithm has to be taken near the ends of the range. Only the entropy is that of tanh(u), so that exploring does not push
    u to where nothing changes.
    """

    parts: tuple[Tensor, ...] = ()

    def __init__(self, mean: Tensor, log_std: Tensor, bounded: Sequence[bool]) -> None:
        """mean [.., K]; log_std and bounded [K]."""
        self.mean = mean.float()
        self.log_std = log_std.float().clamp(LEAST_LOG, MOST_LOG).expand_as(self.mean)
        self.bounded = torch.tensor(list(bounded), device=mean.device)

    def sample(self) -> Tensor:
        """Draws [.., K] from torch's global generator."""
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def likeliest(self) -> Tensor:
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log density of the numbers [.., K] before squashing, summed over them: [..]."""
        away = (actions - self.mean) * (-self.log_std).exp()
        return -(0.5 * away.square() + self.log_std + 0.5 * math.log(2 * math.pi)).sum(-1)

    def score(self, actions: Tensor) -> Tensor:
        """The gradient of the log density of the numbers [.., K] in the means: [.., K]."""
        return (actions - self.mean) * (-2 * self.log_std).exp()

    def entropy(self) -> Tensor:
        """That of the normal numbers plus, for squashed ones, the mean of log d tanh(u) / du, by Gauss-Hermite quadrature."""
        places, weights = np.polynomial.hermite_e.hermegauss(NODES)
        u = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * self.mean.new_tensor(places)
        slope = 2 * (math.log(2) - u - torch.nn.functional.softplus(-2 * u))  # log(1 - tanh(u)^2)
        squash = (slope * self.mean.new_tensor(weights / weights.sum())).sum(-1)
        normal = self.log_std + 0.5 * math.log(2 * math.pi * math.e)
        return (normal + torch.where(self.bounded, squash, 0.0)).sum(-1)


class Both:
    """Choices and numbers in one action, [.., K + N] with the choices first, as floats."""

    def __init__(self, choices: Choices, numbers: Numbers) -> None:
        self.choices, self.numbers, self.count = choices, numbers, len(choices.parts)
        self.parts = choices.parts

    def sample(self) -> Tensor:
        return torch.cat([self.choices.sample().float(), self.numbers.sample()], -1)

    def likeliest(self) -> Tensor:
        return torch.cat([self.choices.likeliest().float(), self.numbers.likeliest()], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        chosen, given = actions[..., : self.count].long(), actions[..., self.count :]
        return self.choices.log_prob(chosen) + self.numbers.log_prob(given)

    def entropy(self) -> Tensor:
        return self.choices.entropy() + self.numbers.entropy()

    def score(self, actions: Tensor) -> Tensor:
        chosen, given = actions[..., : self.count].long(), actions[..., self.count :]
        return torch.cat([self.choices.score(chosen), self.numbers.score(given)], -1)


ActionDistribution = Choices | Numbers | Both
