"""Temporary cuts of all spans that a model predicts, to see what shorter memories would cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expire_span.ops.rule import full_until, lifetime, until_dead

from .trace import Line, Trace

PREDICTOR = "span_predictor"
"""Attribute name of the module that maps hidden states to spans, in every memory system."""
ROUNDS = 3
"""Most rounds of adjusting the share to a budget. One is not enough, since a cut also changes the spans of later layers."""
CLOSE = 0.02
"""Relative difference between living memories and budget at which the budget counts as met."""


@dataclass(frozen=True)
class Cut:
    """How lifetimes are shortened; both None: not at all."""

    max_span: float | None = None
    """Spans are clamped to this, in steps."""
    live: float | None = None
    """A budget: all lifetimes are multiplied by one share, so that this many memories are alive on average over the text."""

    def __post_init__(self) -> None:
        if self.max_span is not None and not 0 <= self.max_span < float("inf"):
            raise ValueError(f"the longest span must be 0 or more and finite, got {self.max_span}")
        if self.live is not None and not 1 <= self.live < float("inf"):
            raise ValueError(f"the budget must be at least 1 living memory and finite, got {self.live}")

    @property
    def active(self) -> bool:
        return self.max_span is not None or self.live is not None


WHOLE = Cut()
"""No cut: lifetimes as the model predicts them."""


@contextlib.contextmanager
def limit_spans(model: nn.Module, limit: float | None = None, share: float = 1.0) -> Iterator[None]:
    """A context in which no span exceeds `limit`, and every lifetime (span + ramp) is multiplied by `share`.

    Afterwards, also after an error, the model is restored.
    """
    Cut(limit)  # refuses an invalid limit
    if limit is None and share == 1:
        yield
        return
    found = [module for name, module in model.named_modules() if name.split(".")[-1] == PREDICTOR]
    # A retrofit keeps its predictors in a ModuleDict of their own.
    found = list(model.values()) if isinstance(model, nn.ModuleDict) else found
    if not found:
        mixer = getattr(getattr(model, "config", None), "mixer", None)
        kind = getattr(mixer, "kind", type(model).__name__)
        raise ValueError(f"the memory system {kind} gives tokens no spans, so none can be cut")

    def shorten(module: Any, args: object, span: Tensor) -> Tensor:
        span = span if share == 1 else full_until(until_dead(span, module.ramp) * share, module.ramp)
        # A limit beyond the range of the spans' dtype cuts nothing, but clamp would refuse it.
        return span if limit is None else span.clamp(max=min(limit, torch.finfo(span.dtype).max))

    hooks = [module.register_forward_hook(shorten) for module in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def trace_cut(model: nn.Module, cut: Cut, read: Callable[[], list[Line]]) -> list[Line]:
    """The trace that `read` makes while lifetimes are cut; its header records the cut."""
    share, lines = 1.0, []
    for _ in range(ROUNDS if cut.live is not None else 1):
        with limit_spans(model, cut.max_span, share):
            lines = read()
        if cut.live is None or _is_met(lines, cut.live):
            break
        share *= find_share(Trace.of(lines), cut.live)
    if cut.max_span is not None:
        lines[0] |= {"max_span": cut.max_span}
    return [lines[0] | ({"budget": cut.live} if cut.live is not None else {}), *lines[1:]]


def mean_live(trace: Trace) -> float:
    """Number of living memories, the mean over steps and layers."""
    return float(np.mean([step["live"] for step in trace.steps]))


def _is_met(lines: list[Line], live: float) -> bool:
    return mean_live(Trace.of(lines)) <= live * (1 + CLOSE)


def find_share(trace: Trace, live: float) -> float:
    """The share, at most 1, by which lifetimes must be multiplied so that a trace's memories meet a budget."""
    spans, ramp = torch.from_numpy(trace.spans), trace.header["ramp"]  # [layers, heads, T]
    left = len(trace) - np.arange(len(trace))  # steps from each birth to the end of the text
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        shorter = full_until(until_dead(spans, ramp) * middle, ramp)
        alive = np.minimum(lifetime(shorter, ramp).numpy(), left).mean((0, 1)).sum() / len(trace)
        low, high = (middle, high) if alive < live else (low, middle)
    return high
