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
from expire_span.web.guard import Guard
from expire_span.web.hosts import OwnHosts
from expire_span.web.streaming import Streamed

from .protocol import MOST_PROMPT, Body, Chat, Completion
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
    default_tokens: int = 256
    """Number of tokens of an answer where the client gives none."""
    patience: float = 30.0
    """Seconds that a client may let the server wait."""


def build_app(
    scheduler: Scheduler, name: str, *, limits: Limits | None = None, hosts: OwnHosts | None = None
) -> FastAPI:
    """The application: /v1/models, /v1/completions and /v1/chat/completions. hosts: by default those of this machine."""
    limits = limits or Limits()
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(
        Guard,
        hosts=hosts or OwnHosts(),
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

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
    async def anything_else(path: str, http: fastapi.Request) -> None:
        has = "GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
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

    def whole(self, index: int, text: str, reason: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": index, "finish_reason": reason, "logprobs": None, **said}

    def piece(self, index: int, text: str, reason: str | None = None, first: bool = False) -> dict[str, Any]:
        """A part of a streamed answer; the first one of a chat says whose it is."""
        delta = ({"role": "assistant"} if first else {}) | ({} if reason else {"content": text})
        said = {"delta": delta} if self.is_chat else {"text": text}
        return {"index": index, "finish_reason": reason, "logprobs": None, **said}

    def event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        kind = f"{self.kind}.chunk" if self.is_chat else self.kind
        return f"data: {json.dumps({**self.head, 'object': kind, 'choices': choices, **more})}\n\n"


class _Call:
    """The requests that answer one call, and their texts as they arrive: (index, piece)."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.requests: list[Request] = []

    async def begin(self, scheduler: Scheduler, body: Body, limits: Limits) -> None:
        options = scheduler.text, limits.default_tokens, self._receiver(), limits.max_prompt
        try:  # in a thread, since a long prompt takes a while to encode
            self.requests = await asyncio.to_thread(body.requests, *options)
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

    def usage(self, prompt_tokens: int) -> dict[str, int]:
        written = sum(request.written for request in self.requests)
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": written}
        return {**counts, "total_tokens": sum(counts.values())}


async def _answer(scheduler: Scheduler, body: Body, words: _Words, limits: Limits, http: fastapi.Request) -> Any:
    call = _Call()
    await call.begin(scheduler, body, limits)
    prompt_tokens = sum(len(request.prompt) for request in call.requests[:: body.choices])
    if body.stream:
        wants_usage = bool((body.stream_options or {}).get("include_usage"))
        events = _events(call, words, prompt_tokens if wants_usage else None)
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
    choices = [words.whole(n, "".join(text), r.reason) for n, (text, r) in enumerate(zip(texts, call.requests))]
    return {**words.head, "object": words.kind, "choices": choices, "usage": call.usage(prompt_tokens)}


async def _cancel_when_gone(call: _Call, http: fastapi.Request) -> None:
    """End the requests of a client that has closed its connection while it waited for the whole answer."""
    while not await http.is_disconnected():
        await asyncio.sleep(POLL)
    call.cancel()


async def _events(call: _Call, words: _Words, prompt_tokens: int | None) -> AsyncIterator[str]:
    """The answer as server-sent events. prompt_tokens: for an event with the number of tokens, where the client wants one."""
    begun: set[int] = set()
    try:
        async for index, piece in call.pieces():
            if call.arrived.qsize() > MOST_UNREAD:
                raise RuntimeError(f"{MOST_UNREAD:,} pieces of the answer wait to be read; read it faster")
            if piece is None:
                choice = words.piece(index, "", call.requests[index].reason, first=index not in begun)
            else:
                choice = words.piece(index, piece, first=index not in begun)
            begun.add(index)
            yield words.event([choice])
        if prompt_tokens is not None:
            yield words.event([], usage=call.usage(prompt_tokens))
    except Exception as error:
        yield f"data: {json.dumps(problem(_status(error), str(error)))}\n\n"
    yield "data: [DONE]\n\n"


def _status(error: Exception) -> int:
    return 400 if isinstance(error, ValueError) else 429 if isinstance(error, Busy) else 503


def _as_answer(error: Exception) -> HTTPException:
    """The refusal that tells an error; a client that was refused for lack of room may ask again soon."""
    status = _status(error)
    return HTTPException(status, str(error), headers={"Retry-After": "1"} if status == 429 else None)
