"""An OpenAI-compatible server over a retrofitted model: completions and chat, whole or streamed (extra `serve`)."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel

from expire_span.checks import check_count, show
from expire_span.sampling import Sampling

from .engine import Engine, Request
from .loading import chat_tokens


class _Asked(BaseModel):
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    n: int = 1

    def request(self, prompt: list[int], default: int) -> Request:
        asked = [x for x in (self.max_completion_tokens, self.max_tokens) if x is not None]
        limit = asked[0] if asked else default
        check_count("max_tokens", limit)
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        seed = self.seed if self.seed is not None else uuid.uuid4().int % 2**31
        return Request(prompt, limit, Sampling(self.temperature, None, self.top_p, seed), stop)


class Completion(_Asked):
    prompt: str = ""


class Chat(_Asked):
    messages: list[dict[str, Any]] = []


def build_app(engine: Engine, name: str, *, default_tokens: int = 256) -> FastAPI:
    """The application: /v1/models, /v1/completions and /v1/chat/completions."""
    app = FastAPI(title="expire-span")

    @app.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "expire-span"}]}

    @app.post("/v1/completions")
    def completions(asked: Completion) -> Any:
        return _answer(
            engine, name, asked, _encode(engine, asked.prompt), _Words("text_completion", "cmpl"), default_tokens
        )

    @app.post("/v1/chat/completions")
    def chat(asked: Chat) -> Any:
        for said in asked.messages:
            if not isinstance(said.get("role"), str) or "content" not in said:
                raise HTTPException(400, f"a message needs a role and a content, got {show(said)}")
        prompt = chat_tokens(engine.tokenizer, asked.messages)
        return _answer(engine, name, asked, prompt, _Words("chat.completion", "chatcmpl"), default_tokens)

    @app.exception_handler(HTTPException)
    def explain(_: Any, error: HTTPException) -> JSONResponse:
        body = {"error": {"message": error.detail, "type": "invalid_request_error"}}
        return JSONResponse(body, status_code=error.status_code)

    return app


class _Words:
    """The field names in which completions and chat answers differ in OpenAI's format."""

    def __init__(self, kind: str, prefix: str) -> None:
        self.kind, self.id = kind, f"{prefix}-{uuid.uuid4().hex}"
        self.is_chat = prefix == "chatcmpl"

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, "logprobs": None, **said}

    def piece(self, text: str, reason: str | None) -> dict[str, Any]:
        said = {"delta": {"role": "assistant", "content": text} if text else {}} if self.is_chat else {"text": text}
        return {"index": 0, "finish_reason": reason, "logprobs": None, **said}


def _answer(engine: Engine, name: str, asked: _Asked, prompt: list[int], words: _Words, default: int) -> Any:
    if not prompt:
        raise HTTPException(400, "the prompt must have at least one token, got none")
    if asked.n != 1:
        raise HTTPException(400, f"n must be 1, got {asked.n}; send several requests")
    try:
        request = asked.request(prompt, default)
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    engine.submit(request)
    head = {"id": words.id, "created": int(time.time()), "model": name}
    if asked.stream:
        return StreamingResponse(_events(request, head, words), media_type="text/event-stream")
    try:
        text = "".join(request.text())
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    counts = {"prompt_tokens": len(prompt), "completion_tokens": len(request.written)}
    usage = {**counts, "total_tokens": sum(counts.values())}
    return {**head, "object": words.kind, "choices": [words.whole(text, request.reason)], "usage": usage}


def _events(request: Request, head: dict[str, Any], words: _Words) -> Iterator[str]:
    """The answer as server-sent events; if the client disconnects, its request ends."""
    kind = f"{words.kind}.chunk" if words.is_chat else words.kind
    try:
        for text in request.text():
            yield f"data: {json.dumps({**head, 'object': kind, 'choices': [words.piece(text, None)]})}\n\n"
        yield f"data: {json.dumps({**head, 'object': kind, 'choices': [words.piece('', request.reason)]})}\n\n"
    except ValueError as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'type': 'invalid_request_error'}})}\n\n"
    finally:
        request.cancelled = True
    yield "data: [DONE]\n\n"


def _encode(engine: Engine, text: str) -> list[int]:
    ids = engine.tokenizer.encode(text)
    start = engine.tokenizer.bos_token_id
    return ids or ([start] if start is not None else [])
