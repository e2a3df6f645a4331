"""The budget controller adjusts the weight of the span loss so that the mean number of live memories meets a target."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from expire_span.checks import check_count, check_fields
from expire_span.settings.run import BudgetConfig

LOSS_MEMORY = 20.0
"""Number of steps over which the running mean of the task loss averages."""
LARGEST_ERROR = 2.0
"""Limit of one step's log error, so that far too few or too many memories at the start do not change the weight too fast."""
FLOOR_SHARE = 1e-2
"""The weight never falls below this share of initial_weight, so that it can rise again soon."""


class BudgetController:
    """Integral control in log space: `log w += gain * log(live / target)`.

    Why this form: the right weight is unknown to several orders of magnitude, so it is changed by factors; and integral control
    has no steady-state error, so the mean number of live memories converges to the target itself. The controller's state stays
    on the device, so that the host never waits for it.
    """

    def __init__(
        self,
        config: BudgetConfig,
        *,
        layers: int,
        bytes_per_memory: int,
        device: torch.device | str = "cpu",
        loss_memory: float = LOSS_MEMORY,
    ) -> None:
        check_fields(config)  # a config built outside of a run has not been checked for infinities yet
        check_count("layers", layers)
        check_count("bytes_per_memory", bytes_per_memory)
        if not loss_memory >= 1:
            raise ValueError(f"loss_memory must be at least 1 step, got {loss_memory}")
        if not config.active:
            raise ValueError(f"a budget needs a target: give live or bytes, got {config.live} and {config.bytes}")
        self.config, self.loss_memory = config, loss_memory
        self.target = config.live if config.live is not None else (config.bytes or 0) / (layers * bytes_per_memory)
        self._low = math.log(config.initial_weight * FLOOR_SHARE)
        self._high = math.log(config.max_weight)
        started = 0.0 if config.start_loss is not None or config.wait else 1.0
        start = [min(math.log(config.initial_weight), self._high), 0.0, 0.0, started, 0.0, 0.0, 0.0]
        # log weight, discounted sum of the loss, discounted number of steps, whether the span loss has started, steps so far,
        # discounted sum of live memories, whether the controller rests
        self._state = torch.tensor(start, dtype=torch.float64, device=device)

    @property
    def weight(self) -> Tensor:
        """The weight of the span loss for the next step (scalar); zero until `wait` steps are over and start_loss is reached,
        and while the controller rests."""
        return (self._state[0].exp() * self._state[3] * (1 - self._state[6])).float()

    @torch.no_grad()
    def update(self, live: Tensor, loss: Tensor) -> None:
        """Update the weight from one step's mean number of live memories per query and layer, and its task loss (scalars)."""
        log_weight, total, count, started, steps, lived, resting = self._state.unbind()
        keep = 1 - 1 / self.loss_memory
        total, count, lived = total * keep + loss.double(), count * keep + 1, lived * keep + live.double()
        running = total / count
        steps = steps + 1
        limit = math.inf if self.config.start_loss is None else self.config.start_loss
        started = torch.maximum(started, ((running < limit) & (steps >= self.config.wait)).double())
        error = (live.double().clamp_min(1e-9) / self.target).log().clamp(-LARGEST_ERROR, LARGEST_ERROR)
        met = lived / count <= self.target
        if self.config.patience_loss is not None:
            suffers = running > self.config.patience_loss
            error, met = torch.where(suffers, error.clamp_max(-1), error), met | suffers
        if self.config.rest:
            resting = met.double()
        log_weight = (log_weight + self.config.gain * error * started).clamp(self._low, self._high)
        self._state = torch.stack([log_weight, total, count, started, steps, lived, resting])

    def start_from(self, weight: float) -> None:
        """Set the weight of the span loss, from which the control continues."""
        self._state[0] = min(max(math.log(weight), self._low), self._high)

    def state_dict(self) -> dict[str, list[float]]:
        return {"state": self._state.tolist()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        # Older states have fewer numbers.
        saved = [*state["state"], *([0.0] * (len(self._state) - len(state["state"])))]
        self._state = torch.tensor(saved, dtype=torch.float64, device=self._state.device)
