"""The fields of a request of the page, and checks of them."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from expire_span.runs import UserError

MOST_TEXT = 200_000
"""Largest number of bytes of text in a request; longer texts are for `expire-span trace`."""
MOST_BODY = 2_000_000
"""Largest number of bytes of a request: JSON may write one byte of text as six, and there are a few other fields."""


def too_long(size: int) -> str:
    return (
        f"the page reads at most {MOST_TEXT:,} bytes of text at once, got {size:,}; "
        "cut it, or write its trace with: expire-span trace RUN --text FILE"
    )


async def read_fields(request: Request) -> dict[str, Any]:
    """The fields of a JSON body. A body of plain bytes is taken as the field `text`, so that files of any encoding can be
    sent."""
    body = await request.body()
    if request.headers.get("content-type") == "application/octet-stream":
        return {"text": _within(body)}
    try:
        fields = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise UserError(f"the request is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise UserError(f"the request must be a JSON object, got a {type(fields).__name__}")
    text = fields.get("text", "")
    if not isinstance(text, str):
        raise UserError(f"text must be a string, got {type(text).__name__}")
    return fields | {"text": _within(text.encode("utf-8", errors="replace"))}


def _within(raw: bytes) -> bytes:
    if len(raw) > MOST_TEXT:
        raise UserError(too_long(len(raw)))
    return raw


def number(fields: dict[str, Any], name: str, default: Any, low: float, high: float) -> Any:
    """A number between two limits, of the type of its default; None is allowed where the default is None."""
    value = fields.get(name, default)
    if value is None and default is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise UserError(f"{name} must be a number between {low:g} and {high:g}, got {value!r}")
    return int(value) if isinstance(default, int) else float(value)
