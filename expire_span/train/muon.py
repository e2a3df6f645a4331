"""torch.optim.Muon with all matrices of one shape orthogonalised together: a few batched products instead of thousands."""

# pyright: reportPrivateImportUsage=false
# The foreach functions are how torch's own optimizers update many tensors in one launch.

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """The same update and the same state as `torch.optim.Muon`, grouped by shape.

    Two options change it. cautious: weights decay only where the update moves them towards zero as well. row_norm: rows of the
    orthogonalised update are divided by the root of a running mean of their mean square, with this factor, and the update is
    then brought back to its norm (as in NorMuon); the running mean is kept as `row_squares` [rows, 1].
    """

    def __init__(self, params: Any, *, cautious: bool = False, row_norm: float = 0.0, **options: Any) -> None:
        super().__init__(params, **options)
        self.cautious, self.row_norm = cautious, row_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            same_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    same_shape[p.shape].append(p)
            for params in same_shape.values():
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        momenta = [self._momentum(p) for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
        updates = torch._foreach_lerp(grads, momenta, group["momentum"]) if group["nesterov"] else momenta
        ortho = orthogonalise(torch.stack(list(updates)), group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = _adjusted_rate(group["lr"], group["adjust_lr_fn"], params[0].shape)
        if self.row_norm:
            ortho = self._even_rows(ortho, params)
        step, decay = list(ortho.to(params[0].dtype).unbind()), group["lr"] * group["weight_decay"]
        if self.cautious:
            stacked = torch.stack(params)
            decays = torch.where(stacked * torch.stack(step) > 0, 1 - decay, 1.0)
            torch._foreach_mul_(params, list(decays.unbind()))
        else:
            torch._foreach_mul_(params, 1 - decay)
        torch._foreach_add_(params, step, alpha=-rate)

    def _even_rows(self, ortho: Tensor, params: list[Tensor]) -> Tensor:
        """Updates [n, rows, columns] with rows of about equal size in the running mean; each matrix keeps its norm."""
        ortho = ortho.float()
        squares = [self._buffer(p, "row_squares", p[:, :1]) for p in params]
        torch._foreach_lerp_(squares, list(ortho.square().mean(2, keepdim=True).unbind()), 1 - self.row_norm)
        even = ortho / torch.stack(squares).sqrt().clamp(min=1e-10)
        return even * (ortho.norm(dim=(1, 2), keepdim=True) / even.norm(dim=(1, 2), keepdim=True).clamp(min=1e-10))

    def _momentum(self, p: Tensor) -> Tensor:
        return self._buffer(p, "momentum_buffer", p)

    def _buffer(self, p: Tensor, name: str, like: Tensor) -> Tensor:
        if name not in self.state[p]:
            self.state[p][name] = torch.zeros_like(like, memory_format=torch.preserve_format)
        return self.state[p][name]


def orthogonalise(x: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations on matrices [n, rows, columns], which move their singular values towards 1.

    They run in bfloat16, as in torch's Muon, except on CPUs: those without bfloat16 units take a hundred times as long for it.
    """
    a, b, c = coefficients
    x = x.float() if x.device.type == "cpu" else x.bfloat16()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _adjusted_rate(lr: float, how: str | None, shape: torch.Size) -> float:
    rows, columns = shape
    if how is None or how == "original":
        return lr * math.sqrt(max(1, rows / columns))
    return lr * 0.2 * math.sqrt(max(rows, columns))
