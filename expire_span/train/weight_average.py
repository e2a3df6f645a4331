"""A running mean of a model's weights, which evaluations use in place of the newest ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average: `average = share * average + (1 - share) * newest`. A share of 0 keeps nothing.

    The mean begins at the weights after the first update and is corrected for nothing, so that early evaluations, before
    `1 / (1 - share)` updates, still lean towards that beginning.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after an update."""
        if not self.share:
            return
        for name, newest in model.state_dict().items():
            if name not in self.weights or not newest.is_floating_point():
                self.weights[name] = newest.clone()
            else:
                self.weights[name].lerp_(newest, 1 - self.share)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Within this context the model has the mean weights; afterwards its own again, also after an error."""
        if not self.weights:
            yield
            return
        newest = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(newest)
