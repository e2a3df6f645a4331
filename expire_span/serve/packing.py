"""A second copy of a model's weights, in the order in which oneDNN multiplies several rows on a CPU.

For a decode step of 4 to some dozens of rows MKL brings every weight into another order before it multiplies, which takes
longer than the product; 2 and 3 rows cost as much as one. The copy has that order already. It takes as many bytes as the
weights, so it is made only where it is asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST = 4
"""Smallest number of rows for which the packed weight is faster."""


class _Packed:
    """The forward pass of a linear layer by its packed weight."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer = layer
        self.weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)

    def __call__(self, x: Tensor) -> Tensor:
        layer = self.layer
        if x.numel() < FEWEST * x.shape[-1]:
            return F.linear(x, layer.weight, layer.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, layer.bias, "none", [], "")


def find_packable(model: Any) -> list[nn.Linear]:
    """The plain linear layers of a model, or of a retrofitted one, in float32 on a CPU. Quantised ones and those that others
    have changed are not among them, and none is where PyTorch has no oneDNN."""
    if not torch.backends.mkldnn.is_available():
        return []
    inner: nn.Module = getattr(model, "model", model)
    plain = (x for x in inner.modules() if type(x) is nn.Linear and "forward" not in x.__dict__)
    return [x for x in plain if x.weight.dtype == torch.float32 and x.weight.device.type == "cpu"]


@contextlib.contextmanager
def packed(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Within, these layers multiply several rows by packed weights; the weights must not change meanwhile. Afterwards they are
    as before, after an exception too."""
    with torch.inference_mode():
        made = [(layer, _Packed(layer)) for layer in layers]
    for layer, forward in made:
        layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]
