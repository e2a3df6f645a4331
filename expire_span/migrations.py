"""Converts configs of older run folders to the current format. Standard library only.

A new field has a default and needs nothing here. A field that moves or changes its meaning gets a step below, and a test with a
config that the older version wrote (tests/data/run-format-1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

OLDEST = 1
"""The oldest format that is still read."""


def _from_1(config: dict[str, Any]) -> dict[str, Any]:
    """Version 2 put config.json under a checksum; the config itself has the same fields."""
    return config


STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""For each format, the function that converts its config to the next format."""


def migrate(config: dict[str, Any], version: int, wanted: int) -> dict[str, Any]:
    """Convert the config of a run folder of format `version` to format `wanted`."""
    for step in range(version, wanted):
        config = STEPS[step](config)
    return config
