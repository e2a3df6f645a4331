"""Performer: linear attention whose features estimate exp(q . k / sqrt(D)) without bias.

    phi(x) = exp(W x' - |x'|^2 / 2) / sqrt(M),  x' = x / D^(1/4)

The rows of W are blocks of orthogonal directions with the lengths of normal vectors.

The features are drawn once from a seed and saved with the weights. A query's features are divided by their largest, which does
not change the quotient. Rotary positions, counted from a row's first token, act on q and k before the features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.models.systems.linear.layer import Linear
from expire_span.models.systems.performer import PerformerConfig


def draw_features(count: int, dim: int, seed: int) -> Tensor:
    """[count, dim]: blocks of orthogonal directions, each as long as a normal vector would be."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(-(-count // dim), dim, dim, generator=generator, dtype=torch.float64)
    turns, upper = torch.linalg.qr(normal)
    turns = turns * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)  # makes directions uniform; else there is a bias
    lengths = torch.randn(count, dim, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (turns.transpose(1, 2).flatten(0, 1)[:count] * lengths).to(torch.get_default_dtype())


def positive_features(x: Tensor, draws: Tensor, *, rescale: bool) -> Tensor:
    """x [.., D] -> [.., M]; `rescale` divides each row by its largest feature."""
    x = x * x.shape[-1] ** -0.25
    exponent = x @ draws.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2
    if rescale:
        exponent = exponent - exponent.detach().amax(-1, keepdim=True)
    return exponent.exp() * draws.shape[0] ** -0.5


class Performer(Linear):
    settings_class = PerformerConfig
    draws: Tensor

    def __init__(self, *shape: Any, **options: Any) -> None:
        super().__init__(*shape, **options)
        seed = self.settings.seed * 1000 + self.shape.depth
        self.register_buffer("draws", draw_features(self.settings.features, self.shape.head_dim, seed))

    @property
    def num_features(self) -> int:
        return self.draws.shape[0]

    def features(self, x: Tensor, *, of_query: bool) -> Tensor:
        return positive_features(x, self.draws, rescale=of_query)

    def turn_features(self, q: Tensor, k: Tensor, pos: Tensor) -> None:
        return None

    def _queries_and_keys(self, x: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        return self.queries(x, pos), self.keys(x, pos)
