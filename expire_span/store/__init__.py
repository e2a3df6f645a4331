"""What a layer keeps: one deletion rule, hidden states or keys and values, several layouts behind one interface."""

from __future__ import annotations

from typing import Any

from expire_span.ops.rule import NEVER

from .hidden import HiddenMemory, trim_states
from .interface import Store
from .memory import ExpiringMemory

__all__ = ["NEVER", "ExpiringMemory", "HiddenMemory", "Store", "restore", "trim_states"]

_LAYOUTS: dict[str, Any] = {cls.layout_name: cls for cls in (ExpiringMemory, HiddenMemory)}


def restore(layout: str, state: dict[str, Any]) -> Store:
    """The store that was saved with this `layout_name` and `state_dict`."""
    if layout not in _LAYOUTS:
        raise ValueError(f"unknown layout {layout!r} of a saved memory, known are: {', '.join(_LAYOUTS)}")
    return _LAYOUTS[layout].from_state_dict(state)
