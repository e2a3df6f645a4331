"""Text as lines of equal length, for figures that draw it letter by letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expire_span.tasks.signs import show_line


def texts_of(steps: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of a trace's steps, each on one line: signs stand for line ends and tabs."""
    return [show_line(step["text"]) for step in steps]


def lay_out(texts: Sequence[str], columns: int) -> list[tuple[float, int]]:
    """Column and row of each piece of text, in lines of `columns` letters."""
    places, column, row = [], 0.0, 0
    for text in texts:
        width = len(text) + (0.6 if len(text) > 1 else 0)
        if column + width > columns:
            column, row = 0.0, row + 1
        places.append((column, row))
        column += width
    return places
