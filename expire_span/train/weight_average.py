"""A running mean of a model's weights, which evaluations use instead of the newest weights."""

# pyright: reportPrivateImportUsage=false
# The foreach functions update many tensors in one launch.

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Exponential moving average: `average = share * average + (1 - share) * newest`. A share of 0 keeps nothing.

    The mean starts at the weights after the first update, without bias correction, so that early evaluations, before about
    `1 / (1 - share)` updates, still depend on those weights.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the weights after an update to the mean."""
        if not self.share:
            return
        newest = model.state_dict()
        means = {name for name in self.weights if newest[name].is_floating_point()}
        self.weights |= {name: x.clone() for name, x in newest.items() if name not in means}
        if means:
            torch._foreach_lerp_([self.weights[n] for n in means], [newest[n] for n in means], 1 - self.share)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """A context in which the model has the mean weights; its own are restored afterwards, also after an error."""
        if not self.weights:
            yield
            return
        newest = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict(self.weights)
        try:
            yield
        finally:
            model.load_state_dict(newest)
