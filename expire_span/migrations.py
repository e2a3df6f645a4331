"""Configs of older run folders in today's form. Standard library only.

A field that is new has a default, so it needs nothing here. A field that moves or changes its meaning gets a step below, and a
test with a config as the older version wrote it (tests/data/run-format-1).
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
"""What turns the config of a format into that of the next."""


def migrate(config: dict[str, Any], version: int, wanted: int) -> dict[str, Any]:
    """The config of a run folder of format `version` as format `wanted` has it."""
    for step in range(version, wanted):
        config = STEPS[step](config)
    return config
