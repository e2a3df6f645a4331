"""What the lines of metrics.jsonl and speed.jsonl and the fields of result.json hold. Standard library only.

Files may be damaged or come from elsewhere, so their fields are checked when they are read; those not named here are free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from expire_span.checks import show
from expire_span.errors import UserError

LARGEST = 2**63
"""No number of a run is as large as this; larger ones cannot be drawn or printed as a fraction."""
Check = Callable[[Any], bool]


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


def is_number(value: Any) -> bool:
    """A number, or NaN or an infinity, which a training that failed may have written."""
    return isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST)


def _is_missing_or_number(value: Any) -> bool:
    return value is None or is_number(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_number, value))


def _are_bands(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(band, dict) and _is_band(band) for band in value)


def _is_band(band: dict[str, Any]) -> bool:
    return all(_is_missing_or_number(value) for value in band.values()) and set(band) >= _BAND


_BAND = {"first", "last", "episodes", "success", "low", "high", "mean_steps", "live", "peak_live"}
_NUMBER: tuple[str, Check] = ("a number", is_number)
_MAYBE: tuple[str, Check] = ("a number or null", _is_missing_or_number)
_LAYERS: tuple[str, Check] = ("a list of numbers, one for each layer", _are_numbers)
_TEXT: tuple[str, Check] = ("text", _is_text)
_WHOLE: tuple[str, Check] = ("a whole number", is_whole)
FIELDS: dict[str, tuple[str, Check]] = {
    **dict.fromkeys(("step", "rows", "tokens", "context"), _WHOLE),
    **dict.fromkeys(("split", "score_name"), _TEXT),
    **dict.fromkeys(("live", "peak_live", "span"), _LAYERS),
    **dict.fromkeys(("loss", "score", "span_loss", "span_weight", "full_bytes"), _MAYBE),
    **dict.fromkeys(("live_share", "mean_bytes", "peak_bytes", "live_at_end", "target"), _NUMBER),
    **dict.fromkeys(("seconds", "tokens_per_second", "ms_per_step"), _NUMBER),
    "bands": ("a list of bands", _are_bands),
}
"""Fields by name: what they hold in words, and whether a value is that."""
METRICS = ("step",)
SPEED = ("step", "seconds", "tokens_per_second", "ms_per_step", "peak_bytes")
MEASURED = ("rows", "score", "live", "peak_live", "mean_bytes", "peak_bytes")
"""Fields that every line, or the result, must have; a result whose costs are compared also those that are measured."""


def check_record(record: dict[str, Any], needed: tuple[str, ...], where: str) -> None:
    """Refuse a record that lacks a needed field, or has one of another type, naming both."""
    for name in (*needed, *record):
        (words, holds), value = FIELDS.get(name, ("", None)), record.get(name)
        if holds is not None and (not holds(value) or (name in needed and value is None)):
            wanted = words.removesuffix(" or null") if name in needed else words
            raise UserError(f"{where} must have {wanted} as {name}, got {show(value)}")
