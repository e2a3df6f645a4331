"""Checks of requests before they reach the server: only pages of the server itself may send them, and their size is limited."""

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


class OwnPagesOnly:
    """Refuses requests with another host or origin, so that no web site open in the same browser can send any."""

    def __init__(self, app: Any, port: int) -> None:
        self.app = app
        self.hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        fault = self.find_fault(scope["headers"])
        if fault is None:
            await self.app(scope, receive, send)
            return
        status, message = fault
        body = json.dumps({"error": message}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def find_fault(self, headers: list[tuple[bytes, bytes]]) -> tuple[int, str] | None:
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        own = " and ".join(sorted(self.hosts))
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return 403, f"this server answers {own} only, got host {', '.join(hosts) or 'none'}"
        if any(origin.removeprefix("http://") not in self.hosts for origin in origins):
            return 403, f"this server answers pages of {own} only, got origin {', '.join(origins)}"
        sizes = [value for name, value in headers if name == b"content-length"]
        if any(not size.isdigit() or int(size) > MOST_BODY for size in sizes):
            return 413, too_long(int(sizes[0])) if sizes[0].isdigit() else "the content length must be a number"
        return None


async def read_body(request: Request) -> bytes:
    """The body; refused once it exceeds the limit, whatever length the headers gave."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BODY:
            raise UserError(too_long(size))
        parts.append(part)
    return b"".join(parts)


async def read_fields(request: Request) -> dict[str, Any]:
    """The fields of a JSON body. A body of plain bytes is taken as the field `text`, so that files of any encoding can be
    sent."""
    body = await read_body(request)
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
