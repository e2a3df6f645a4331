"""Faults that are known and not mended yet; they are counted apart and fail no test. Remove an entry with its fault."""

from __future__ import annotations

from typing import Any

KNOWN: dict[str, tuple[str, Any]] = {}
"""Name of the fault: the face that finds it, and whether a case and its message show it."""


def known_fault(face: str, case: dict[str, Any], message: str) -> str | None:
    for name, (where, shows) in KNOWN.items():
        if where == face and message.startswith("AssertionError") and shows(case, message):
            return name
    return None
