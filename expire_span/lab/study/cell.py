"""The gated unit of docs/recurrent.md for many networks at once: one seed each, trained side by side.

    z = sigmoid(Wz x + Uz h'),  r = sigmoid(Wr x + Ur h'),  c = tanh(Wc x + Uc (r * h')),  h = h' + z (c - h')

These are the equations of `models/systems/recurrent/gated.py`. They are written a second time because small networks spend
their time on launching operations, not on arithmetic: here all seeds share every operation, and a hand-written backward pass
needs only a few operations a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GatedScan(torch.autograd.Function):
    """gates [T, N, B, 2U] and candidates [T, N, B, U], the parts that depend on x; Ug [N, U, 2U], Uc [N, U, U] -> h [T, N, B,
    U].

    T steps, N networks, B series, U units.
    """

    @staticmethod
    def forward(ctx: Any, gates: Tensor, candidates: Tensor, ug: Tensor, uc: Tensor) -> Tensor:
        steps, units = len(gates), candidates.shape[-1]
        opened, c = torch.empty_like(gates), torch.empty_like(candidates)
        before = candidates.new_zeros(steps + 1, *candidates.shape[1:])
        for t in range(steps):
            h = before[t]
            torch.sigmoid(torch.baddbmm(gates[t], h, ug), out=opened[t])
            z, r = opened[t].split(units, -1)
            torch.tanh(torch.baddbmm(candidates[t], r * h, uc), out=c[t])
            torch.lerp(h, c[t], z, out=before[t + 1])
        ctx.save_for_backward(opened, c, before, ug, uc)
        return before[1:].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # type: ignore[override]
        opened, c, before, ug, uc = ctx.saved_tensors
        h, (z, r) = before[:-1], opened.chunk(2, -1)
        to_c, to_z, to_r = z * (1 - c * c), (c - h) * z * (1 - z), h * r * (1 - r)
        keep, r = 1 - z, r.contiguous()
        ug_back, uc_back = ug.mT.contiguous(), uc.mT.contiguous()
        d_gates, d_c = torch.empty_like(opened), torch.empty_like(c)
        dh = torch.zeros_like(c[0])
        for t in reversed(range(len(c))):
            dh = dh + grad[t]
            torch.mul(dh, to_c[t], out=d_c[t])
            d_rh = torch.bmm(d_c[t], uc_back)
            torch.cat((dh * to_z[t], d_rh * to_r[t]), -1, out=d_gates[t])
            dh = torch.baddbmm(dh * keep[t] + d_rh * r[t], d_gates[t], ug_back)
        return d_gates, d_c, _sum_outer(h, d_gates), _sum_outer(r * h, d_c)


def _sum_outer(left: Tensor, right: Tensor) -> Tensor:
    """The gradient of a weight [N, in, out] from its inputs and outputs [T, N, B, *], over all steps and rows."""
    left, right = (x.transpose(0, 1).flatten(1, 2) for x in (left, right))
    return torch.bmm(left.mT.contiguous(), right)
