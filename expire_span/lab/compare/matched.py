"""Equal parameters: chooses the feed-forward width, and a recurrent system's hidden size, to match the recipe's total."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expire_span.runs import UserError
from expire_span.train.estimate import count_parameters

TOLERANCE = 0.01
"""Largest relative difference between a system's number of parameters and the recipe's."""
STEPS = (16, 8, 1)
"""Feed-forward widths are multiples of the first of these that matches closely enough: GPUs are faster with round numbers."""
CLOSE = 0.003


def match_parameters(model: Any, target: int) -> Any:
    """The decoder or policy with `target` parameters, as nearly as whole widths allow."""
    if hasattr(model.mixer, "hidden"):
        model = _match_hidden(model, target)
    best = _match_width(model, target)
    if getattr(model.mixer, "value_factor", 1) > 1 and count_parameters(best) > (1 + TOLERANCE) * target:
        # With wide values even the narrowest model has too many parameters.
        best = _match_width(replace(model, mixer=replace(model.mixer, value_factor=1)), target)
    off = count_parameters(best) / target - 1
    if abs(off) > TOLERANCE:
        raise UserError(
            f"{model.mixer.kind} cannot have the recipe's {target:,} parameters: with ff_dim {best.ff_dim} "
            f"it has {count_parameters(best):,} ({off:+.1%}); give a larger --model.ff-dim"
        )
    return best


def _match_width(model: Any, target: int) -> Any:
    """Choose ff_dim. The number of parameters is linear in it, so two counts determine where the target lies."""
    base = count_parameters(replace(model, ff_dim=1))
    slope = count_parameters(replace(model, ff_dim=2)) - base
    wanted = 1 + (target - base) / slope
    best = model
    for step in STEPS:
        width = max(1, model.ff_dim + step * round((wanted - model.ff_dim) / step))
        best = replace(model, ff_dim=width)
        if abs(base + slope * (width - 1) - target) <= CLOSE * target:
            break
    return best


def _match_hidden(model: Any, target: int) -> Any:
    """The widest recurrent state that, with the recipe's own ff_dim, stays within the target."""
    low, high = 1, 8 * model.dim
    while low < high:
        middle = (low + high + 1) // 2
        if count_parameters(_with_hidden(model, middle)) <= target:
            low = middle
        else:
            high = middle - 1
    return _with_hidden(model, low)


def _with_hidden(model: Any, hidden: int) -> Any:
    return replace(model, mixer=replace(model.mixer, hidden=hidden))
