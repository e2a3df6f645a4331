"""The gated unit over time, with a backward pass that is written by hand: time is a loop of small operations, and this one
needs only a few of them a step.

    z = sigmoid(gates + Ug h'),  r = sigmoid(..),  c = tanh(candidates + Uc (r * h')),  h = h' + z (c - h')
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GatedScan(torch.autograd.Function):
    """gates [T, B, 2U] and candidates [T, B, U], the parts that depend on x; ug [U, 2U], uc [U, U], start [B, U] -> h.

    T steps, B series, U units; h [T, B, U]. goes_on [T, B, 1]: 0 where a step does not follow from the one before, or None.
    For N networks side by side, all of them have N before their last two dimensions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        candidates: Tensor,
        ug: Tensor,
        uc: Tensor,
        start: Tensor,
        goes_on: Tensor | None = None,
    ) -> Tensor:
        add_product = _add_product(gates)
        opened, c, before, after = torch.empty_like(gates), *(torch.empty_like(candidates) for _ in range(3))
        h = start
        for t in range(len(gates)):
            h = torch.mul(h, 1 if goes_on is None else goes_on[t], out=before[t])
            z, r = torch.sigmoid(add_product(gates[t], h, ug), out=opened[t]).chunk(2, -1)
            torch.tanh(add_product(candidates[t], r * h, uc), out=c[t])
            h = torch.lerp(h, c[t], z, out=after[t])
        ctx.save_for_backward(opened, c, before, ug, uc, goes_on)
        return after

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        opened, c, before, ug, uc, goes_on = ctx.saved_tensors
        add_product, (z, r) = _add_product(opened), opened.chunk(2, -1)
        to_c, to_z, to_r = z * (1 - c * c), (c - before) * z * (1 - z), before * r * (1 - r)
        keep, r = 1 - z, r.contiguous()
        ug_back, uc_back = ug.mT.contiguous(), uc.mT.contiguous()
        d_gates, d_c = torch.empty_like(opened), torch.empty_like(c)
        dh = torch.zeros_like(c[0])
        for t in reversed(range(len(c))):
            dh = dh + grad[t]
            d_rh = torch.matmul(torch.mul(dh, to_c[t], out=d_c[t]), uc_back)
            torch.cat((dh * to_z[t], d_rh * to_r[t]), -1, out=d_gates[t])
            dh = add_product(torch.addcmul(d_rh * r[t], dh, keep[t]), d_gates[t], ug_back)
            dh = dh if goes_on is None else dh * goes_on[t]
        return d_gates, d_c, _sum_outer(before, d_gates), _sum_outer(r * before, d_c), dh, None


def _add_product(gates: Tensor) -> Any:
    """x + a @ b for the matrices of one network, or of several at once."""
    return torch.addmm if gates.dim() == 3 else torch.baddbmm


def _sum_outer(left: Tensor, right: Tensor) -> Tensor:
    """The gradient of a weight [.., in, out] from its inputs and outputs [T, .., B, *], over all steps and rows."""
    left, right = (x.movedim(0, -3).flatten(-3, -2) for x in (left, right))
    return torch.matmul(left.mT.contiguous(), right)
