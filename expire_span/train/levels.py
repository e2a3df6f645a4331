"""The budgets of one run: each has span predictors and a controller of its own, and steps serve them in turn.

So what is served at a budget was trained at that budget. The contexts, the observation of the base model's attention from which
all of them start, and LoRA weights are shared.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.hf.adapter import budget_folder
from expire_span.hf.retrofitted import Retrofit
from expire_span.settings.retrofit import DistillConfig
from expire_span.settings.run import BudgetConfig

from .budget import BudgetController


@dataclass(eq=False)
class Level:
    """One budget."""

    name: str
    """Its subfolder of the adapter; empty for the one that --budget gives."""
    target: float
    """Living memories per head at the end of a context."""
    predictors: nn.ModuleDict
    controller: BudgetController

    def weights(self, retrofitted: Retrofit) -> dict[str, Tensor]:
        """What is learned for this budget, by names that no other budget has."""
        front = f"{self.name}/" if self.name else ""
        learned = retrofitted.learned() if not self.name else self.predictors.state_dict()
        return {f"{front}{name}": x.detach().cpu().clone() for name, x in learned.items()}

    def load(self, retrofitted: Retrofit, weights: dict[str, Tensor]) -> None:
        """Take this budget's part of all weights of a checkpoint."""
        if not self.name:
            retrofitted.load_learned({name: x for name, x in weights.items() if "/" not in name})
            return
        front = f"{self.name}/"
        self.predictors.load_state_dict({n.removeprefix(front): x for n, x in weights.items() if n.startswith(front)})


def build_levels(retrofitted: Retrofit, config: DistillConfig, device: torch.device) -> list[Level]:
    """The level of the budget, which has the retrofit's own predictors, and those of further budgets, which have copies."""
    ramp, size, first = retrofitted.config.ramp, retrofitted.bytes_per_token, retrofitted.config.keep_first
    levels = [_build("", config.target(ramp, size), retrofitted.predictors, config, device)]
    for share in config.further:
        predictors: Any = copy.deepcopy(retrofitted.predictors)
        target = config.target(ramp, size, first, share)
        levels.append(_build(budget_folder(share), target, predictors, config, device))
    return levels


def _build(name: str, target: float, predictors: nn.ModuleDict, config: DistillConfig, device: torch.device) -> Level:
    budget = BudgetConfig(live=target, initial_weight=config.initial_weight, gain=config.gain, max_weight=1.0)
    return Level(name, target, predictors, BudgetController(budget, layers=1, bytes_per_memory=1, device=device))
