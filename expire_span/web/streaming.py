"""Responses that are sent in parts while they are made."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import StreamingResponse


class Streamed(StreamingResponse):
    """Calls `end` when the response is over, however it ends.

    A generator's own `finally` does not do for that: it is not run if the client has gone before the first part was asked for,
    and only by the next garbage collection if the response is cut off while a part is being sent.
    """

    def __init__(self, parts: AsyncIterator[Any], end: Callable[[], None], **options: Any) -> None:
        super().__init__(parts, **options)
        self._end = end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()
