"""An OpenAI-compatible server: completions and chat, whole or streamed (extra `serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fastapi
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from expire_span.checks import show
from expire_span.web.guard import OWNER, Guard, Keys
from expire_span.web.hosts import OwnHosts
from expire_span.web.streaming import Streamed

from .operations import add_operations
from .protocol import MOST_ANSWER, MOST_KEPT, MOST_PROMPT, Body, Chat, Completion
from .requests import Request
from .scheduler import Busy, Scheduler

POLL = 0.2
"""Seconds between two looks whether a client that waits for a whole answer is still there."""
MOST_UNREAD = 4096
"""Pieces of a streamed answer that wait for a client that reads more slowly than the model writes; then the answer ends."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the server."""

    max_body: int = 4_000_000
    """Largest number of bytes of a request."""
    max_prompt: int = MOST_PROMPT
    """Largest number of tokens of a prompt."""
    max_kept: int = MOST_KEPT
    """Largest number of tokens of a chat that never expire."""
    max_answer: int = MOST_ANSWER
    """Largest number of tokens that a client may ask for as an answer."""
    default_tokens: int = 256
    """Number of tokens of an answer where the client gives none."""
    patience: float = 30.0
    """Seconds that a client may let the server wait."""


def build_app(
    scheduler: Scheduler,
    name: str,
    *,
    limits: Limits | None = None,
    hosts: OwnHosts | None = None,
    keys: Keys | None = None,
) -> FastAPI:
    """The application: OpenAI's /v1/models, /v1/completions and /v1/chat/completions; /v1/memory, /metrics and /health.

    hosts: by default those of this machine; keys: those that may ask, by default everybody.
    """
    limits = limits or Limits()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(
        Guard,
        hosts=hosts or OwnHosts(),
        keys=keys,
        most_body=limits.max_body,
        patience=limits.patience,
        problem=problem,
        too_long=lambda size: f"a request may have {limits.max_body:,} bytes, got {size:,}; send less at once",
    )
    this = {"id": name, "object": "model", "created": 0, "owned_by": "expire-span"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [this]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str) -> dict[str, Any]:
        if wanted != name:
            raise HTTPException(404, f"this server has the model {name}, got {show(wanted)[1:-1]}")
        return this

    @app.post("/v1/completions")
    async def completions(body: Completion, http: fastapi.Request) -> Any:
        return await _answer(scheduler, body, _Words("text_completion", "cmpl", name), limits, http)

    @app.post("/v1/chat/completions")
    async def chat(body: Chat, http: fastapi.Request) -> Any:
        return await _answer(scheduler, body, _Words("chat.completion", "chatcmpl", name), limits, http)

    add_operations(app, scheduler, name)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
    async def anything_else(path: str, http: fastapi.Request) -> None:
        has = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /v1/memory, GET /metrics and GET /health"
        raise HTTPException(404, f"this server has {has}, got {http.method} {show('/' + path)[1:-1]}")

    app.add_exception_handler(AnyHTTPException, _explain)
    app.add_exception_handler(RequestValidationError, _explain)
    return app


async def _explain(_: Any, error: Any) -> JSONResponse:
    """Any refusal in OpenAI's form; a field of a wrong type is named in a sentence."""
    if not isinstance(error, RequestValidationError):
        status, headers = error.status_code, error.headers
        return JSONResponse(problem(status, str(error.detail)), status_code=status, headers=headers)
    first = error.errors()[0]
    if isinstance(first.get("input"), bytes):
        message = "the body was not sent as JSON; give the header Content-Type: application/json"
        return JSONResponse(problem(400, message), status_code=400)
    place = next((part for part in first["loc"][1:] if isinstance(part, str)), "the body")
    message = f"{place}: {first['msg']}, got {show(first.get('input'))}"
    return JSONResponse(problem(400, message), status_code=400)


def problem(status: int, message: str) -> dict[str, Any]:
    """A refusal in OpenAI's form."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


class _Words:
    """The parts of an answer in which completions and chat differ in OpenAI's format."""

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self.is_chat = prefix == "chatcmpl"
        self.kind = kind
        self.head = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def whole(self, index: int, text: str, request: Request) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, "finish_reason": request.reason, "logprobs": None, **said, **_session(request)}

    def piece(self, index: int, text: str, ended: Request | None = None, first: bool = False) -> dict[str, Any]:
        """A part of a streamed answer; the first one of a chat says whose it is."""
        delta = ({"role": "assistant"} if first else {}) | ({} if ended else {"content": text})
        said = {"delta": delta} if self.is_chat else {"text": text}
        end = {"finish_reason": None} if ended is None else {"finish_reason": ended.reason, **_session(ended)}
        return {"index": index, "logprobs": None, **end, **said}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = f"{self.kind}.chunk" if self.is_chat else self.kind
        return f"data: {json.dumps({**self.head, 'object': kind, 'choices': choices, **more})}\n\n"


def _session(request: Request) -> dict[str, str]:
    return {} if request.session is None else {"session": request.session}


class _Call:
    """The requests that answer one call, and their texts as they arrive: (index, piece)."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.requests: list[Request] = []

    async def begin(self, scheduler: Scheduler, body: Body, limits: Limits, owner: str) -> None:
        most = limits.max_prompt, limits.max_kept, limits.max_answer
        options = scheduler.text, limits.default_tokens, self._receiver(), *most, owner
        try:  # in a thread, since a long prompt takes a while to encode, and a session to read
            self.requests = await asyncio.to_thread(body.requests, *options)
            await asyncio.to_thread(_look_for_beginnings, scheduler, self.requests[:: body.choices])
            scheduler.submit(*self.requests)
        except (ValueError, RuntimeError) as error:
            raise _as_answer(error) from error

    def _receiver(self) -> Callable[[int], Any]:
        loop = asyncio.get_running_loop()

        def put(index: int, piece: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server has been stopped, and nobody reads any more
                loop.call_soon_threadsafe(self.arrived.put_nowait, (index, piece))

        return lambda index: partial(put, index)

    async def pieces(self) -> AsyncIterator[tuple[int, str | None]]:
        """The pieces of all texts; None after the last one of a text. Raises the exception that ended one of them."""
        left = len(self.requests)
        while left:
            index, piece = await self.arrived.get()
            if isinstance(piece, Exception):
                raise piece
            left -= piece is None
            yield index, piece

    def cancel(self) -> None:
        for request in self.requests:
            request.cancelled = True

    def usage(self, choices: int) -> dict[str, Any]:
        """The numbers of tokens of all texts, `choices` of which share a prompt."""
        written, first = sum(request.written for request in self.requests), self.requests[::choices]
        counts = {"prompt_tokens": sum(len(x.prompt) for x in first), "completion_tokens": written}
        details = {"prompt_tokens_details": {"cached_tokens": sum(x.cached for x in first)}}
        return {**counts, "total_tokens": sum(counts.values()), **details}


def _look_for_beginnings(scheduler: Scheduler, requests: list[Request]) -> None:
    """Read what is known about prompts from the folder of sessions, so that the scheduler need not wait for the disk."""
    if scheduler.sessions is not None:
        for request in requests:
            request.begun = scheduler.sessions.find(request.owner, request.prompt, request.chat.marks, load=True)


async def _answer(scheduler: Scheduler, body: Body, words: _Words, limits: Limits, http: fastapi.Request) -> Any:
    call = _Call()
    await call.begin(scheduler, body, limits, http.scope.get(OWNER, ""))
    if body.stream:
        wants_usage = bool((body.stream_options or {}).get("include_usage"))
        events = _events(call, words, body.choices if wants_usage else None)
        return Streamed(events, call.cancel, media_type="text/event-stream")
    texts: list[list[str]] = [[] for _ in call.requests]
    watch = asyncio.create_task(_cancel_when_gone(call, http))
    try:
        async for index, piece in call.pieces():
            texts[index].append(piece or "")
    except Exception as error:
        raise _as_answer(error) from error
    finally:
        watch.cancel()
        call.cancel()
    choices = [words.whole(n, "".join(text), r) for n, (text, r) in enumerate(zip(texts, call.requests))]
    return {**words.head, "object": words.kind, "choices": choices, "usage": call.usage(body.choices)}


async def _cancel_when_gone(call: _Call, http: fastapi.Request) -> None:
    """End the requests of a client that has closed its connection while it waited for the whole answer."""
    while not await http.is_disconnected():
        await asyncio.sleep(POLL)
    call.cancel()


async def _events(call: _Call, words: _Words, choices: int | None) -> AsyncIterator[str]:
    """The answer as server-sent events. choices: texts for each prompt, for an event with the numbers of tokens, where the
    client wants one."""
    begun: set[int] = set()
    try:
        async for index, piece in call.pieces():
            if call.arrived.qsize() > MOST_UNREAD:
                raise RuntimeError(f"{MOST_UNREAD:,} pieces of the answer wait to be read; read it faster")
            if piece is None:
                choice = words.piece(index, "", call.requests[index], first=index not in begun)
            else:
                choice = words.piece(index, piece, first=index not in begun)
            begun.add(index)
            yield words.event([choice])
        if choices is not None:
            yield words.event([], usage=call.usage(choices))
    except Exception as error:
        yield f"data: {json.dumps(problem(_status(error), str(error)))}\n\n"
    yield "data: [DONE]\n\n"


def _status(error: Exception) -> int:
    return 400 if isinstance(error, ValueError) else 429 if isinstance(error, Busy) else 503


def _as_answer(error: Exception) -> HTTPException:
    """The refusal that tells an error; a client that was refused for lack of room may ask again soon."""
    status = _status(error)
    return HTTPException(status, str(error), headers={"Retry-After": "1"} if status == 429 else None)
