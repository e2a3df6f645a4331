"""Checks of the lines of a trace file, which may come from anybody: types, shapes and ranges of what pictures read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from expire_span.checks import show

MOST_LANES = 65_536
"""Largest number of layers times heads of a trace."""

Line = dict[str, Any]


def find_fault(line: Line, number: int, header: Line) -> str:
    """What is wrong with a line ("FIELD must be ..., got ..."); an empty text if nothing is. number: 0 for the header."""
    for name, (is_right, words) in (_step_rules(number - 1, header) if number else HEADER).items():
        if name in line and not is_right(line[name]):
            return f"{name} must be {words}, got {show(line[name])}"
    if not number and line["layers"] * line["heads"] > MOST_LANES:
        return f"layers x heads must be at most {MOST_LANES:,}, got {line['layers']:,} x {line['heads']:,}"
    for name in ("spans", "dies") if number else ():
        if (line.get(name) is None) != (header["memory_bytes"] is None):
            return f"{name} must be there if the header's memory_bytes is, got {show(line.get(name))}"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_amount(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_list(value: Any, check: Callable[[Any], bool], count: int | None = None) -> bool:
    return type(value) is list and (count is None or len(value) == count) and all(map(check, value))


HEADER: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("name", "task", "about", "system", "vocabulary"), (_is_text, "a text")),
    "layers": (_is_count, "a whole number of 1 or more"),
    "heads": (_is_count, "a whole number of 1 or more"),
    "ramp": (_is_amount, "a number of 0 or more"),
    "full_bytes": (_is_amount, "a number of 0 or more"),
    "max_span": (_or_none(_is_amount), "a number of 0 or more, or null"),
    "memory_bytes": (_or_none(_is_amount), "a number of 0 or more, or null"),
}
"""Which values a field of the header may have, and how that is said."""


def _step_rules(place: int, header: Line) -> dict[str, tuple[Callable[[Any], bool], str]]:
    """The same for the step with this number."""
    layers, heads = header["layers"], header["heads"]
    a_layer = f"a list of {layers} numbers, one for each layer"

    def is_death(value: Any) -> bool:
        if not _is_list(value, lambda x: type(x) is int, 3):
            return False
        layer, head, birth = value
        return 0 <= layer < layers and 0 <= head < heads and 0 <= birth <= place

    def is_guess(value: Any) -> bool:
        return type(value) is list and len(value) == 2 and _is_text(value[0]) and _is_number(value[1])

    def is_answer(value: Any) -> bool:
        return type(value) is dict and _is_text(value.get("text")) and _is_number(value.get("bits"))

    return {
        "i": (lambda x: type(x) is int and x == place, f"{place}, since steps are numbered in order"),
        "text": (_is_text, "a text"),
        "image": (_or_none(_is_text), "a picture as text"),
        "live": (lambda x: _is_list(x, _is_amount, layers), a_layer),
        "bytes": (lambda x: _is_list(x, _is_amount, layers), a_layer),
        "spans": (
            _or_none(lambda x: _is_list(x, lambda row: _is_list(row, _is_number, heads), layers)),
            f"{layers} x {heads} numbers, one for each layer and head, or null",
        ),
        "dies": (
            _or_none(
                lambda x: _is_list(x, lambda row: _is_list(row, lambda t: type(t) is int and t >= place, heads), layers)
            ),
            f"{layers} x {heads} steps, none before {place}, one for each layer and head, or null",
        ),
        "deaths": (
            _or_none(lambda x: _is_list(x, is_death)),
            f"a list of [layer, head, birth] within {layers} layers, {heads} heads and births up to {place}",
        ),
        "hidden": (
            _or_none(lambda x: _is_list(x, lambda row: _is_list(row, _is_number), layers)),
            f"{layers} lists of numbers, one for each layer",
        ),
        "top": (_or_none(lambda x: _is_list(x, is_guess)), "a list of [text, probability]"),
        "answer": (_or_none(is_answer), "a text and its bits"),
        **{name: (_or_none(_is_number), "a number, or null") for name in ("bits", "reward", "value")},
    }
