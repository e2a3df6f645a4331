"""Checks of requests before an application sees them, for every server of this package."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Iterable
from typing import Any

from .hosts import OwnHosts

MOST_HEADERS = 100
"""Largest number of header lines of a request."""
BODIES = 32
"""Number of bodies of full size that may be in memory at a time; many more small ones fit."""
STOPPED = "the server was stopped before it could answer; ask again"


OWNER = "expire_span.owner"
"""Entry of a request's scope that tells whose key it came with."""


class Keys:
    """The keys of an API, as clients send them: `Authorization: Bearer KEY`."""

    def __init__(self, keys: Iterable[str], open_paths: tuple[str, ...] = ()) -> None:
        """open_paths: what may be asked without a key."""
        self._owners = {hashlib.sha256(key.encode()).digest() for key in keys}
        self.open_paths = open_paths

    def find_owner(self, headers: list[tuple[bytes, bytes]], path: str) -> str:
        """A name for whoever asks, which does not give the key away; Refusal if the request has no key that is known."""
        sent = [value for name, value in headers if name == b"authorization"]
        kind, _, key = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        known = [hmac.compare_digest(digest, owner) for owner in self._owners]
        if kind.lower() == b"bearer" and any(known):
            return hashlib.sha256(b"owner" + digest).hexdigest()
        if path in self.open_paths:
            return ""
        got = "an unknown one" if sent else "none"
        raise Refusal(401, f"this server needs a key, as Authorization: Bearer KEY, got {got}; ask who runs it for one")


class Refusal(Exception):
    """A request is refused with this status; the message says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Guard:
    """ASGI middleware that refuses foreign hosts and origins, and bodies that are too long or arrive too slowly. An application
    behind it gets each body whole."""

    def __init__(
        self,
        app: Any,
        *,
        hosts: OwnHosts,
        most_body: int,
        patience: float,
        problem: Callable[[int, str], Any],
        too_long: Callable[[int], str],
        keys: Keys | None = None,
    ) -> None:
        """most_body: bytes; patience: seconds for a whole body; problem: a refusal as the server writes it; too_long: the
        sentence about a body of a size; keys: those that may ask, None for everybody."""
        self.app, self.hosts, self.most_body, self.patience = app, hosts, most_body, patience
        self.problem, self.too_long, self.keys = problem, too_long, keys
        self.held = 0
        """Bytes of the bodies of all requests under way."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        parts: list[bytes] = []
        started = False

        async def note(message: Any) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            self._check(scope["headers"])
            if self.keys is not None:
                scope[OWNER] = self.keys.find_owner(scope["headers"], scope["path"])
            if await self._read(receive, parts):
                await self.app(scope, _replay(b"".join(parts), receive), note)
        except Refusal as refusal:
            await self._refuse(refusal, send)
        except asyncio.CancelledError:
            if not started:
                await self._refuse(Refusal(503, STOPPED), send)
        finally:
            self.held -= sum(map(len, parts))

    def _check(self, headers: list[tuple[bytes, bytes]]) -> None:
        if len(headers) > MOST_HEADERS:
            raise Refusal(431, f"a request may have {MOST_HEADERS} header lines, got {len(headers):,}; leave some out")
        if fault := self.hosts.find_fault(headers):
            raise Refusal(403, fault)
        for size in (int(value) for name, value in headers if name == b"content-length"):
            self._check_size(size)

    def _check_size(self, size: int) -> None:
        if size > self.most_body:
            raise Refusal(413, self.too_long(size))

    async def _read(self, receive: Any, parts: list[bytes]) -> bool:
        """Collect the body's parts, whatever length the headers gave; False if the client has gone."""
        size, more = 0, True
        try:
            async with asyncio.timeout(self.patience):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return False
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    self._check_size(size)
                    self._hold(part, parts)
        except TimeoutError:
            raise Refusal(
                408, f"the body did not arrive within {self.patience:g} s, got {size:,} bytes of it"
            ) from None
        return True

    def _hold(self, part: bytes, parts: list[bytes]) -> None:
        if self.held + len(part) > BODIES * self.most_body:
            raise Refusal(503, f"requests of {self.held:,} bytes are under way, as many as fit; ask again")
        self.held += len(part)
        parts.append(part)

    async def _refuse(self, refusal: Refusal, send: Any) -> None:
        body = json.dumps(self.problem(refusal.status, str(refusal))).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"www-authenticate", b"Bearer")] if refusal.status == 401 else []
        await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _replay(body: bytes, receive: Any) -> Callable[[], Any]:
    """A receive function that gives the body first, and then what else is received: that the client has gone."""
    given = False

    async def again() -> Any:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
