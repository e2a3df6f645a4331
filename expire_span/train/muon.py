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
    """The same update and the same state as `torch.optim.Muon`, grouped by shape."""

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
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(ortho.to(params[0].dtype).unbind()), alpha=-rate)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state["momentum_buffer"]


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
