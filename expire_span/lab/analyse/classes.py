"""Classifies every letter of a text as newline, section title, space, digit, name or rest."""

from __future__ import annotations

import re

import numpy as np

CLASSES = ("newline", "title", "space", "digit", "name", "rest")
"""A letter belongs to the first of these that fits. A title is a line between equals signs, as wikis have it, or a line of
capitals, as books have it. A name is a word with a capital in the middle of a sentence."""

LONGEST_TITLE = 100
"""Largest number of letters of a title; longer lines of capitals are tables."""
_WORD = re.compile(r"[A-Z][A-Za-z\u00c0-\u024f'-]*[a-z]")
_ENDS = ".!?\n"
_SKIPPED = " \t\"'([*_\u201c\u201d\u2018\u2019"
"""Characters that may occur between the end of a sentence and the first word of the next."""


def classify(text: str) -> np.ndarray:
    """The class of every letter, as an index into `CLASSES`."""
    found = np.full(len(text), CLASSES.index("rest"), np.int64)
    letters = np.array(list(text)) if text else np.zeros(0, "<U1")
    for start, end in find_names(text):
        found[start:end] = CLASSES.index("name")
    found[np.char.isdigit(letters)] = CLASSES.index("digit")
    found[(letters == " ") | (letters == "\t")] = CLASSES.index("space")
    for start, end in find_titles(text):
        found[start:end] = CLASSES.index("title")
    found[letters == "\n"] = CLASSES.index("newline")
    return found


def find_titles(text: str) -> list[tuple[int, int]]:
    """Start and end of every line that is a title."""
    found, start = [], 0
    for line in text.split("\n"):
        if _is_title(line.strip()):
            found.append((start, start + len(line)))
        start += len(line) + 1
    return found


def _is_title(line: str) -> bool:
    if not 3 <= len(line) <= LONGEST_TITLE:
        return False
    marked = line[0] == line[-1] == "=" and line.strip("= ") != ""
    return marked or (line.isupper() and sum(letter.isalpha() for letter in line) >= 3)


def find_names(text: str) -> list[tuple[int, int]]:
    """Start and end of every capitalised word that does not begin a sentence."""
    return [m.span() for m in _WORD.finditer(text) if not _begins_sentence(text, m.start())]


def _begins_sentence(text: str, place: int) -> bool:
    before = place - 1
    while before >= 0 and text[before] in _SKIPPED:
        before -= 1
    return before < 0 or text[before] in _ENDS
