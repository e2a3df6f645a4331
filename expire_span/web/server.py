"""A uvicorn server that no client can hold up, and that ends when it is asked to."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import http
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS = 512
"""Largest number of open connections, if the process may open twice as many files."""
BACKLOG = 128
"""Connections that wait to be accepted. asyncio tries to accept as many at once, and reports each that fails."""
SWEEP = 5
"""Connections are checked every so many ticks of uvicorn's loop, which last 0.1 s."""
CUT_OFF = 1.0
"""Seconds in which answers that were cut off are sent."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ServerConfig(uvicorn.Config):
    """Settings of a `Server`."""

    def __init__(self, app: Any, *, patience: float, grace: float, problem: Callable[[int, str], Any]) -> None:
        """patience: seconds that a client may let the server wait, for a request or for reading an answer; grace: seconds that
        answers have to end once the server stops; problem: a refusal as the server writes it."""
        super().__init__(app, http=Connection, ws="none", loop="asyncio", log_level="error", backlog=BACKLOG)
        self.timeout_graceful_shutdown = grace + CUT_OFF  # type: ignore[assignment]  # fractions of a second are fine
        self.patience, self.grace, self.problem = patience, grace, problem
        self.connections = most_connections()


class Server(uvicorn.Server):
    """Stops after the first SIGINT or SIGTERM, within `grace` seconds and a moment; a second signal ends the process at once.

    refuse: called when it begins to stop; cut_off: called `grace` seconds later, to end the answers that are left.
    """

    config: ServerConfig

    def __init__(
        self,
        config: ServerConfig,
        refuse: Callable[[], None] = lambda: None,
        cut_off: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(config)
        self.refuse, self.cut_off = refuse, cut_off
        self._told = -float("inf")

    async def startup(self, sockets: Any = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().startup(sockets)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Say once a minute that no connection can be accepted, which asyncio reports many times a second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in TOO_MANY_FILES):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told > 60:
            self._told = time.monotonic()
            print("clients wait, since too many files are open; raise the limit with ulimit -n", file=sys.stderr)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP == 0:
            for connection in list(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.check(time.monotonic())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # answers that are cut off now are no faults
        self.refuse()
        asyncio.get_running_loop().call_later(self.config.grace, self.cut_off)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals while the server runs. Afterwards the process ends by the one that came, so that it waits for no
        thread that still works on a request."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        came: list[int] = []

        def stop(number: int, frame: Any) -> None:
            for each in SIGNALS:  # whatever the process does then, it ends
                signal.signal(each, signal.SIG_DFL)
            came.append(number)
            self.should_exit = True

        before = {each: signal.signal(each, stop) for each in SIGNALS}
        try:
            yield
        finally:
            if came:
                signal.raise_signal(came[0])
            for each, handler in before.items():
                signal.signal(each, handler)


class Connection(H11Protocol):
    """uvicorn's connection; it ends if its client lets it wait too long, or if there are too many."""

    config: ServerConfig
    begun: float | None = None
    """When the connection began to wait for the headers of a request; None during a request and between two of them, where
    uvicorn itself closes idle connections."""
    unsent, unsent_since = 0, 0.0
    """Bytes of an answer that the client has not taken, and since when there are so many."""

    @property
    def busy(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.begun = time.monotonic()
        if len(self.connections) > self.config.connections:
            self._hang_up(503, f"this server has its {self.config.connections} connections open; ask again")

    def data_received(self, data: bytes) -> None:
        self.begun = self.begun or time.monotonic()
        super().data_received(data)
        if self.busy:
            self.begun = None

    def check(self, now: float) -> None:
        """Close the connection if its client has not sent or read anything for too long."""
        patience, unsent = self.config.patience, self.transport.get_write_buffer_size()
        if unsent != self.unsent:
            self.unsent, self.unsent_since = unsent, now
        elif unsent and now - self.unsent_since > patience:
            self.transport.abort()
        elif not self.busy and self.begun is not None and now - self.begun > patience:
            self._hang_up(408, f"the request's headers did not arrive within {patience:g} s")

    def send_400_response(self, msg: str) -> None:
        self._hang_up(400, "the request is no HTTP/1.1 that this server understands, or its headers are too long")

    def _hang_up(self, status: int, message: str) -> None:
        """Close the connection, with a sentence if the client has begun a request; what follows an answer gets none."""
        silent = status == 408 and not self.conn.trailing_data[0]
        if not silent and not self.transport.is_closing() and not self.busy:
            body = json.dumps(self.config.problem(status, message)).encode()
            head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()


def most_connections() -> int:
    """Half of the files that the process may open are for connections."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MOST_CONNECTIONS, files // 2))


def exempt_loaded() -> None:
    """Take what is loaded by now out of Python's garbage collection: modules and model stay as long as the process. A full
    collection would go through them again and again, and no token could be generated meanwhile."""
    gc.collect()
    gc.freeze()
