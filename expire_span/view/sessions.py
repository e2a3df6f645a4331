"""Texts that are being generated for a page: each can be paused, stepped and resumed, and ends when its page is closed."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from starlette.concurrency import run_in_threadpool

from expire_span.runs import UserError

from .trace import Line, encode
from .tracer import READ_BLOCK

MOST_SESSIONS = 8
"""Largest number of texts generated at the same time."""
LISTEN_EVERY = 0.5
"""Seconds between two checks of whether the page of a paused text is still open."""
Action = Literal["pause", "step", "resume", "stop"]


@dataclass
class Session:
    lines: Iterator[Line]
    prompt: int
    """Number of lines that are sent without pausing: those of the header and the prompt."""
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    running: bool = True
    steps: int = 0
    """Number of steps that may still be made while paused."""
    stopped: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    left: Callable[[], Awaitable[bool]] | None = None
    """Asks whether the page has disconnected."""

    def act(self, action: Action) -> None:
        self.running = {"pause": False, "step": False, "resume": True}.get(action, self.running)
        self.steps += action == "step"
        self.stopped |= action == "stop"
        self.wake.set()

    async def may_go(self) -> bool:
        """Wait until the next line may be made; returns False once the session was stopped."""
        while not self.stopped:
            if self.running or self.steps:
                self.steps = 0 if self.running else self.steps - 1
                return True
            self.wake.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), LISTEN_EVERY)
            self.stopped |= self.left is not None and await self.left()
        return False

    def take(self, most: int) -> bytes:
        """The next lines, encoded, at most `most` of them; empty once there are no more."""
        return b"".join(map(encode, islice(self.lines, most)))

    async def stream(self) -> AsyncIterator[bytes]:
        left = self.prompt
        while not self.stopped and (left > 0 or await self.may_go()):
            count = min(max(left, 1), READ_BLOCK)
            part = await run_in_threadpool(self.take, count)
            if not part:
                return
            left -= count
            self.stopped |= self.left is not None and await self.left()
            yield part


class Sessions:
    def __init__(self) -> None:
        self.open: dict[str, Session] = {}

    def add(self, session: Session) -> Session:
        if len(self.open) >= MOST_SESSIONS:
            raise UserError(f"{MOST_SESSIONS} texts are being generated already; stop one, or close its tab")
        self.open[session.name] = session
        return session

    def act(self, name: str, action: str) -> None:
        if action not in ("pause", "step", "resume", "stop"):
            raise UserError(f"unknown action {action!r}; known are: pause, step, resume, stop")
        if name not in self.open:
            raise UserError(f"no text {name!r} is being generated; it has ended or was stopped")
        self.open[name].act(action)

    async def stream(self, session: Session) -> AsyncIterator[bytes]:
        """The session's lines."""
        try:
            async for part in session.stream():
                yield part
        finally:
            self.end(session)

    def end(self, session: Session) -> None:
        """Stop and remove a session: it has written all, or its tab was closed."""
        self.open.pop(session.name, None)
        session.stopped = True
