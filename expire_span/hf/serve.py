"""An OpenAI-compatible server over a retrofitted model: completions and chat, whole or streamed (extra `serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import fastapi
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException

from expire_span.checks import show

from .answers import Request
from .asked import Asked, Chat, Completion
from .engine import AnswerEngine

POLL = 0.2
"""Seconds between two looks whether a client that waits for a whole answer is still there."""


def build_app(engine: AnswerEngine, name: str, *, default_tokens: int = 256) -> FastAPI:
    """The application: /v1/models, /v1/completions and /v1/chat/completions."""
    app = FastAPI(title="expire-span")
    this = {"id": name, "object": "model", "created": 0, "owned_by": "expire-span"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [this]}

    @app.get("/v1/models/{wanted:path}")
    async def model(wanted: str) -> dict[str, Any]:
        if wanted != name:
            raise HTTPException(404, f"this server has the model {name}, got {wanted}")
        return this

    @app.post("/v1/completions")
    async def completions(asked: Completion, http: fastapi.Request) -> Any:
        return await _answer(engine, asked, _Words("text_completion", "cmpl", name), default_tokens, http)

    @app.post("/v1/chat/completions")
    async def chat(asked: Chat, http: fastapi.Request) -> Any:
        return await _answer(engine, asked, _Words("chat.completion", "chatcmpl", name), default_tokens, http)

    @app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"])
    async def anything_else(path: str, http: fastapi.Request) -> None:
        has = "GET /v1/models, POST /v1/completions and POST /v1/chat/completions"
        raise HTTPException(404, f"this server has {has}, got {http.method} /{path}")

    app.add_exception_handler(AnyHTTPException, _explain)
    app.add_exception_handler(RequestValidationError, _explain)
    return app


async def _explain(_: Any, error: Any) -> JSONResponse:
    """Any refusal in OpenAI's form; a field of a wrong type is named in a sentence."""
    if not isinstance(error, RequestValidationError):
        return JSONResponse(_problem(error.status_code, str(error.detail)), status_code=error.status_code)
    first = error.errors()[0]
    if isinstance(first.get("input"), bytes):
        message = "the body was not sent as JSON; give the header Content-Type: application/json"
        return JSONResponse(_problem(400, message), status_code=400)
    place = next((part for part in first["loc"][1:] if isinstance(part, str)), "the body")
    message = f"{place}: {first['msg']}, got {show(first.get('input'))}"
    return JSONResponse(_problem(400, message), status_code=400)


def _problem(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
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


class _Answers:
    """The requests that answer one call, and their texts as they arrive: (index, piece)."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self.requests: list[Request] = []

    async def begin(self, engine: AnswerEngine, asked: Asked, default: int) -> None:
        options = engine.tokenizer, engine.handle, default, self._receiver()
        try:  # in a thread, since a long prompt takes a while to encode
            self.requests = await asyncio.to_thread(asked.requests, *options)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        for request in self.requests:
            engine.submit(request)

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


async def _answer(engine: AnswerEngine, asked: Asked, words: _Words, default: int, http: fastapi.Request) -> Any:
    answers = _Answers()
    await answers.begin(engine, asked, default)
    prompt_tokens = sum(len(request.prompt) for request in answers.requests[:: asked.choices])
    if asked.stream:
        wants_usage = bool((asked.stream_options or {}).get("include_usage"))
        events = _events(answers, words, prompt_tokens if wants_usage else None)
        return StreamingResponse(events, media_type="text/event-stream")
    texts = [""] * len(answers.requests)
    watch = asyncio.create_task(_cancel_when_gone(answers, http))
    try:
        async for index, piece in answers.pieces():
            texts[index] += piece or ""
    except Exception as error:
        raise HTTPException(_status(error), str(error)) from error
    finally:
        watch.cancel()
        answers.cancel()
    choices = [words.whole(n, text, r.reason) for n, (text, r) in enumerate(zip(texts, answers.requests))]
    return {**words.head, "object": words.kind, "choices": choices, "usage": answers.usage(prompt_tokens)}


async def _cancel_when_gone(answers: _Answers, http: fastapi.Request) -> None:
    """End the requests of a client that has closed its connection while it waited for the whole answer."""
    while not await http.is_disconnected():
        await asyncio.sleep(POLL)
    answers.cancel()


async def _events(answers: _Answers, words: _Words, prompt_tokens: int | None) -> AsyncIterator[str]:
    """The answer as server-sent events; if the client disconnects, its requests end. prompt_tokens: for an event with the
    number of tokens, where the client wants one."""
    begun: set[int] = set()
    try:
        async for index, piece in answers.pieces():
            if piece is None:
                choice = words.piece(index, "", answers.requests[index].reason, first=index not in begun)
            else:
                choice = words.piece(index, piece, first=index not in begun)
            begun.add(index)
            yield words.event([choice])
        if prompt_tokens is not None:
            yield words.event([], usage=answers.usage(prompt_tokens))
    except Exception as error:
        yield f"data: {json.dumps(_problem(_status(error), str(error)))}\n\n"
    finally:
        answers.cancel()
    yield "data: [DONE]\n\n"


def _status(error: Exception) -> int:
    return 400 if isinstance(error, ValueError) else 503
