"""Signs that stand for letters which cannot be seen. Standard library only."""

from __future__ import annotations

SIGNS = {"\n": "⏎", "\t": "⇥", " ": "␣"}
"""The sign of each letter that leaves no mark where text is shown letter by letter."""


def show_line(text: str) -> str:
    """A text on one line: signs stand for its line ends and tabs."""
    return text.replace("\n", SIGNS["\n"]).replace("\t", SIGNS["\t"])
