"""`expire-span view`: a local server for the page. It listens on the loopback address only and stores nothing between
requests."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool

from expire_span.checkpoint import list_checkpoints, newest_sound
from expire_span.generate import Sampling
from expire_span.runs import RunError, RunFolder, UserError
from expire_span.shipped import SHIPPED
from expire_span.web.guard import Guard
from expire_span.web.hosts import OwnHosts
from expire_span.web.server import Server, ServerConfig
from expire_span.web.streaming import Streamed

from .assets import render_page
from .fields import MOST_BODY, MOST_TEXT, number, read_fields, too_long
from .limit import WHOLE, Cut
from .sessions import Session, Sessions
from .source import open_adapter, open_reader
from .trace import Line, encode, read_lines
from .tracer import READ_BLOCK

NEXT_PORTS = 50
"""Ports tried after the wanted one."""
SAMPLE_TOKENS = 2048
"""Number of tokens of the task's sample with which the page opens."""
MOST_WRITTEN = 100_000
"""Largest number of tokens of one generated text."""
PATIENCE = 30.0
"""Seconds that a browser may let the server wait: for a whole request, or for reading on in an answer."""


class Source:
    """What the page shows: a run, whose newest checkpoint is taken whenever a page is opened, an adapter, or a trace."""

    def __init__(
        self,
        run: RunFolder | None = None,
        trace: Path | None = None,
        *,
        adapter: Path | None = None,
        model: str | None = None,
    ) -> None:
        """model: the adapter's base model, if it is not where the adapter says."""
        self.run, self.trace, self.adapter, self.model = run, trace, adapter, model
        self._reader: Any | None = None
        self._newest = self._shown = ""
        self._lock = threading.Lock()

    @property
    def path(self) -> Path | None:
        return self.run.path if self.run else self.trace or self.adapter

    def reader(self) -> Any:
        """A reader with the newest intact checkpoint; while the run is still training, later calls take newer ones."""
        with self._lock:
            if self.adapter is not None:
                self._reader = self._reader or open_adapter(self.adapter, self.model)
                return self._reader
            if self.run is None:
                raise UserError(f"{self.trace} is a trace without a model; open a run to read other texts")
            newest = next((path.name for path in list_checkpoints(self.run)), "")
            if self._reader is None or newest != self._newest:
                self._reader = open_reader(self.run)
                sound = newest_sound(self.run)
                self._newest, self._shown = newest, sound.name if sound else ""
            return self._reader

    def warm(self) -> None:
        """Load the model and run it once, so that the first page need not wait for that."""
        if self.trace is None and self.describe()["text"]:
            for _ in self.reader().trace_text(b"read " * (READ_BLOCK // 5)):
                pass

    def describe(self) -> dict[str, Any]:
        info: dict[str, Any] = {"most_text": MOST_TEXT, "model": False, "error": "", "text": False, "generate": False}
        info["name"] = self.path.name if self.path else ""
        info["training"] = self.run is not None and not self.run.finished
        if self.trace is None:
            try:
                reader = self.reader()
                info |= {"model": True, "name": reader.name, "text": reader.reads_text, "checkpoint": self._shown}
                info |= {"generate": reader.generates, "agent": reader.plays}
                info["vocabulary"] = reader.vocabulary
                info["example"] = self.adapter is not None or self.path == SHIPPED
            except (RunError, ValueError) as error:
                info["error"] = str(error)
        return info

    def sample(self, cut: Cut = WHOLE, number: int | None = None) -> Iterator[Line]:
        if self.trace is not None:
            return read_lines(self.trace)
        return self.reader().trace_sample(SAMPLE_TOKENS, cut, number)


def build_app(source: Source, port: int) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    hosts = OwnHosts(("127.0.0.1", "localhost"), port=port)
    app.add_middleware(Guard, hosts=hosts, most_body=MOST_BODY, patience=PATIENCE, problem=problem, too_long=too_long)
    sessions = Sessions()
    app.state.sessions = sessions
    app.exception_handler(ValueError)(_refuse)
    app.exception_handler(RunError)(_refuse)

    @app.get("/")
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        return HTMLResponse(render_page(live=True, nonce=nonce), headers=_page_headers(nonce))

    @app.get("/api/info")
    def info() -> dict[str, Any]:
        return source.describe()

    @app.post("/api/sample")
    async def sample(request: Request) -> StreamingResponse:
        fields = await read_fields(request)
        cut, episode = _read_cut(fields), number(fields, "episode", None, 0, 2**31)
        return await _stream_lines(request, lambda: source.sample(cut, None if episode is None else int(episode)))

    @app.post("/api/trace")
    async def trace(request: Request) -> StreamingResponse:
        fields = await read_fields(request)
        cut = _read_cut(fields)
        return await _stream_lines(request, lambda: source.reader().trace_text(fields["text"], cut))

    @app.post("/api/generate")
    async def generate(request: Request) -> StreamingResponse:
        fields = await read_fields(request)
        sampling, count = _read_sampling(fields), number(fields, "max_tokens", 1000, 1, MOST_WRITTEN)
        reader = await run_in_threadpool(source.reader)
        prompt = len(reader.encode(fields["text"] or b"\n"))
        session = Session(reader.generate(fields["text"], sampling, count), prompt + 1)
        session.left = request.is_disconnected
        session.running = not fields.get("paused", False)
        sessions.add(session)
        return _answer(_announce(sessions, session), lambda: sessions.end(session))

    @app.post("/api/generate/{name}/{action}")
    async def act(name: str, action: str) -> dict[str, bool]:
        sessions.act(name, action)
        return {"done": True}

    return app


def _page_headers(nonce: str) -> dict[str, str]:
    """The page may run its own script, marked by the nonce, and ask this server; nothing else."""
    rules = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
    rules += "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return {"content-security-policy": rules, "x-content-type-options": "nosniff", "cache-control": "no-store"}


def _read_sampling(fields: dict[str, Any]) -> Sampling:
    top_k = number(fields, "top_k", None, 1, 2**31)
    temperature, seed = number(fields, "temperature", 1.0, 0, 100), number(fields, "seed", 0, 0, 2**62)
    return Sampling(temperature, None if top_k is None else int(top_k), None, seed)


def _read_cut(fields: dict[str, Any]) -> Cut:
    return Cut(number(fields, "max_span", None, 0, 2**31), number(fields, "live", None, 1, 2**31))


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """Errors of the user are one sentence."""
    return JSONResponse(problem(400, " ".join(str(error).split())), status_code=400)


def problem(status: int, message: str) -> dict[str, str]:
    """A refusal as the page reads it."""
    return {"error": message}


async def _announce(sessions: Sessions, session: Session) -> AsyncIterator[bytes]:
    yield encode({"kind": "session", "name": session.name})
    async for part in sessions.stream(session):
        yield part


async def _stream_lines(request: Request, start: Callable[[], Iterator[Line]]) -> StreamingResponse:
    """Stream a trace as it is made. An error at the start becomes an error response, a later one the last line."""
    parts = _encode_parts(await run_in_threadpool(start))
    first = await run_in_threadpool(next, parts)

    async def rest() -> AsyncIterator[bytes]:
        yield first
        async for part in iterate_in_threadpool(parts):
            if await request.is_disconnected():  # the tab was closed
                return
            yield part

    return _answer(rest())


def _encode_parts(lines: Iterator[Line], size: int = READ_BLOCK) -> Iterator[bytes]:
    """The header, then lines in parts of `size`, as many as the model reads in one call.

    Switching threads and sending for every single line would take longer than computing it.
    """
    yield encode(next(lines))
    while part := b"".join(map(encode, islice(lines, size))):
        yield part


def _answer(parts: AsyncIterator[bytes], end: Callable[[], None] = lambda: None) -> StreamingResponse:
    """end: called when the response is over, or its client has gone."""

    async def whole() -> AsyncIterator[bytes]:
        try:
            async for part in parts:
                yield part
        except (ValueError, RunError) as error:
            yield encode({"kind": "error", "error": " ".join(str(error).split())})

    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Streamed(whole(), end, media_type="application/x-ndjson", headers=headers)


def leave_a_core() -> None:
    """Compute with one CPU thread fewer than torch would use, but at least one.

    The browser draws on the same machine while the model reads. If every core had a thread of the model, those threads would
    wait for one another whenever the browser occupies a core: on two cores, two threads read more slowly than one.
    """
    torch.set_num_threads(max(torch.get_num_threads() - 1, 1))


def bind_port(wanted: int) -> socket.socket:
    """A socket on this machine's own address: the wanted port, or the next free one."""
    for port in range(wanted, min(wanted + NEXT_PORTS, 65536)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            # Listen before the model is loaded: a page opened meanwhile waits, and no other program takes the port.
            sock.listen(100)
            return sock
        sock.close()
    raise UserError(f"no port from {wanted} to {wanted + NEXT_PORTS - 1} is free; give another with --port")


def serve(source: Source, sock: socket.socket, *, ready: Any = None) -> None:
    """Answer until interrupted. `ready` is called with the server before it starts, so that a test can stop it."""
    config = ServerConfig(build_app(source, sock.getsockname()[1]), patience=PATIENCE, grace=0, problem=problem)
    server = Server(config)
    if ready is not None:
        ready(server)
    server.run(sockets=[sock])
