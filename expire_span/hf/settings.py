"""Settings of a retrofit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import require
from expire_span.models.systems.expire_span import ExpireSpanConfig, HeadReach


@dataclass(frozen=True)
class RetrofitConfig:
    """How memories of a retrofitted model expire."""

    max_span: int = 4096
    """Longest span a memory can be given, in tokens (L). A memory is gone after max_span + ramp tokens at the latest."""
    ramp: int = 128
    """Soft edge of the mask, in tokens (R). Only memories on the ramp teach the span predictors."""
    initial_span: float = 0.999
    """Share of max_span that every memory gets before training: nothing expires in a context of this length."""
    temperature: float = 1.0
    """Divides the predictors' input; below 1 they learn faster what sets tokens apart."""
    cap: int | None = None
    """Hard limit on stored memories per row and head; the one closest to its end goes first, which is not exact."""
    impl: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """Implementation of the operator; auto takes triton on a GPU and chunked elsewhere."""

    def __post_init__(self) -> None:
        self.lifetimes()  # checks the fields that both have
        require(self.cap is None or self.cap >= 1, f"cap must be at least 1, got {self.cap}")

    def lifetimes(self) -> ExpireSpanConfig:
        """The same in the words of the memory system: a span per key/value head that leaves hidden states as they are."""
        return ExpireSpanConfig(
            max_span=self.max_span,
            ramp=self.ramp,
            initial_span=self.initial_span,
            temperature=self.temperature,
            span_per="kv_head",
            span_loss="l1",
            reach=HeadReach(stop_gradient=True),
        )


@dataclass(frozen=True)
class DistillConfig:
    """How the predictors learn what a frozen model can forget."""

    budget: float | None = None
    """Living memories at the end of a context, as a share of its tokens."""
    budget_tokens: float | None = None
    """The same as a number of memories per head."""
    budget_bytes: int | None = None
    """The same in bytes of keys, values, spans and positions per row, over all layers that learn."""
    context: int = 4096
    """Tokens of a training context; the budget is met at its end."""
    block: int = 1024
    """Tokens per forward pass: the gradient horizon. The memory is carried from block to block."""
    batch: int = 4
    """Contexts per optimizer step."""
    steps: int = 400
    """Optimizer steps."""
    anneal: float = 0.6
    """Share of the steps over which the budget falls from the whole context to its target."""
    budget_from: float = 1.0
    """Share of the context from which on the budget counts, in proportion to the tokens read; 1 is at its end only."""
    lr: float | None = None
    """Learning rate of the predictors; None is 0.5 over the model's width, since a predictor sums over the width."""
    decay: float = 0.3
    """Share of the steps, at the end, over which the learning rate falls to a twentieth."""
    gain: float = 0.1
    """How fast the weight of the span loss follows the budget."""
    initial_weight: float = 1e-5
    """Weight of the span loss (mean span in tokens) to start from."""
    clip: float = 1.0
    """Largest gradient norm."""
    checkpoint_every: int = 50
    """Steps between checkpoints."""
    seed: int = 0
    """Seed of the choice of contexts."""

    def __post_init__(self) -> None:
        given = {
            n: getattr(self, n) for n in ("budget", "budget_tokens", "budget_bytes") if getattr(self, n) is not None
        }
        require(len(given) == 1, f"give one of budget, budget_tokens and budget_bytes, got {given or 'none'}")
        share = self.budget
        require(
            share is None or 0 < share <= 1, f"budget is a share of the context and must lie in (0, 1], got {share}"
        )
        for name in ("context", "block", "batch", "steps", "checkpoint_every"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("anneal", "decay", "budget_from"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")

    def target(self, ramp: int, bytes_per_token: int) -> float:
        """The budget as living memories per head at the end of a context."""
        if self.budget is not None:
            live = self.budget * self.context
        else:
            live = self.budget_tokens if self.budget_tokens is not None else (self.budget_bytes or 0) / bytes_per_token
        require(
            live <= self.context, f"the budget of {live:g} memories is more than the context of {self.context} tokens"
        )
        least = (
            f"every memory lives for its ramp of {ramp} tokens, so {ramp} is the least budget, got {live:g} memories"
        )
        require(live >= ramp, f"{least}; give more, or a shorter ramp")
        return live
