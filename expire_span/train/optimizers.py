"""Optimizers and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from torch import nn
from torch.optim import AdamW, Optimizer

from .muon import BatchedMuon


class OptimizerSettings(Protocol):
    """The settings that this module reads; `TrainConfig` and `AgentTrainConfig` have them and document each."""

    @property
    def steps(self) -> int: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def lr(self) -> float: ...
    @property
    def muon_lr(self) -> float: ...
    @property
    def span_lr_scale(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def warmup(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def decay_share(self) -> float: ...
    @property
    def final_lr(self) -> float: ...


def build_optimizers(model: nn.Module, config: OptimizerSettings) -> list[Optimizer]:
    """AdamW for everything, or Muon for the blocks' matrices and AdamW for the rest; a group's `peak` is its peak rate."""
    matrices, spans, decayed, plain = [], [], [], []
    for name, p in model.named_parameters():
        if "span_predictor" in name:
            spans.append(p)
        elif config.optimizer == "muon" and p.dim() == 2 and "blocks." in name and "head_gate" not in name:
            matrices.append(p)  # the gates' few rows each give one number, so there is nothing to orthogonalise
        else:
            (decayed if p.dim() >= 2 else plain).append(p)
    groups = [
        {"params": decayed, "peak": config.lr, "weight_decay": config.weight_decay},
        {"params": plain, "peak": config.lr, "weight_decay": 0.0},
        {"params": spans, "peak": config.lr * config.span_lr_scale, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).device.type == "cuda"
    optimizers: list[Optimizer] = [AdamW([g for g in groups if g["params"]], lr=0.0, betas=config.betas, fused=fused)]
    if matrices:
        group = {"params": matrices, "peak": config.muon_lr}
        optimizers.append(BatchedMuon([group], lr=0.0, weight_decay=config.weight_decay))
    return optimizers


def rate_factor(step: int, config: OptimizerSettings) -> float:
    """Share of the peak learning rate at optimizer step `step` (0, 1, ...): warm-up, then the schedule."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "constant":
        return 1.0
    start = config.warmup
    if config.schedule == "linear":
        start = max(start, round(config.steps * (1 - config.decay_share)))
    progress = min(max(step - start, 0) / max(config.steps - 1 - start, 1), 1.0)
    shape = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return config.final_lr + (1 - config.final_lr) * shape


def set_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def dip_decay(optimizers: Iterable[Optimizer], weight_decay: float, dip: float, progress: float) -> None:
    """Set the weight decay of groups that have one: (1 - dip) of `weight_decay` halfway, all of it at both ends of training."""
    if not dip:
        return
    factor = 1 - dip * (1 - math.cos(2 * math.pi * min(progress, 1.0))) / 2
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if group["weight_decay"] > 0:
                group["weight_decay"] = weight_decay * factor
