"""The check that settings use for their values. Standard library only."""

from __future__ import annotations


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)
