"""Stacks of gated layers that read a number each step and give a number: one network per seed, all trained together."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expire_span.models.systems.recurrent.scan import GatedScan


class Layer(nn.Module):
    """One gated layer of every network: x [T, N or 1, B, in] -> h [T, N, B, U]."""

    def __init__(self, dim: int, units: int, draws: list[torch.Generator]) -> None:
        super().__init__()
        make = lambda *shape: nn.Parameter(draw_uniform(draws, units**-0.5, *shape))  # noqa: E731
        self.gates, self.gate_bias = make(dim, 2 * units), make(1, 2 * units)
        self.candidate, self.candidate_bias = make(dim, units), make(1, units)
        self.gates_back, self.candidate_back = make(units, 2 * units), make(units, units)

    def forward(self, x: Tensor) -> Tensor:
        gates = torch.matmul(x, self.gates) + self.gate_bias
        candidates = torch.matmul(x, self.candidate) + self.candidate_bias
        start = candidates.new_zeros(candidates.shape[1:])
        return GatedScan.apply(gates, candidates, self.gates_back, self.candidate_back, start)  # type: ignore[return-value]


class Networks(nn.Module):
    """`networks(values [N, B, T]) -> counts [N, B, T]`: layers of gated units, then a linear read-out.

    Initial weights are uniform in +-1/sqrt(units), as in torch.nn.GRU. Each seed has a generator of its own, so that a network
    does not depend on which others are trained beside it.
    """

    def __init__(self, layers: int, units: int, seeds: list[int]) -> None:
        super().__init__()
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.layers = nn.ModuleList(Layer(1 if n == 0 else units, units, draws) for n in range(layers))
        self.out = nn.Parameter(draw_uniform(draws, units**-0.5, units, 1))
        self.out_bias = nn.Parameter(torch.zeros(len(seeds), 1, 1))

    def forward(self, values: Tensor) -> Tensor:
        h = values.permute(2, 0, 1).unsqueeze(-1).contiguous()  # [T, N, B, 1]
        for layer in self.layers:
            h = layer(h)
        return (torch.matmul(h, self.out) + self.out_bias).squeeze(-1).permute(1, 2, 0)

    def clip(self, limit: float = 1.0) -> None:
        """Clip the gradient norm of each network separately."""
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads]).sum(0).sqrt()
        share = (limit / norms.clamp(min=limit)).view(-1, 1, 1)
        for grad in grads:
            grad.mul_(share)

    @property
    def weights(self) -> int:
        """Number of weights of one network."""
        return sum(p[0].numel() for p in self.parameters())


def draw_uniform(draws: list[torch.Generator], limit: float, *shape: int) -> Tensor:
    """[N, *shape], uniform in +-limit, each network from its own generator."""
    return torch.stack([(2 * torch.rand(*shape, generator=draw) - 1) * limit for draw in draws])
