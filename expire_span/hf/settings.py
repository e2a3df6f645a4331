"""Settings of a retrofit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from expire_span.checks import require
from expire_span.config import ExpireSpanConfig


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
            shapes_states=False,
        )
