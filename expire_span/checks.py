"""The check that settings use for their values. Standard library only."""

from __future__ import annotations

import math
import typing
from typing import Any


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def check_fields(config: Any) -> None:
    """Refuse text or nothing where a field of a config is a number, numbers that are not finite, and unknown words."""
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(hint) is typing.Literal:
            words = typing.get_args(hint)
            require(value in words, f"{name} must be one of {', '.join(map(str, words))}, got {value!r}")
        elif hint in (int, float):
            number = isinstance(value, (int, float)) and math.isfinite(value)
            require(number, f"{name} must be a finite number, got {value!r}")
