"""The server's engine: several requests on one model, each with a stream and memory of its own, one token in turn.

One thread runs the model. At most `rows` requests run at a time; the others wait until one is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from expire_span.checks import check_count
from expire_span.sampling import Sampling

from .handle import Retrofit
from .streams import Stream


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and the queue through which its text comes out piece by piece."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    pieces: queue.Queue = field(default_factory=queue.Queue)
    """The text in pieces as it is generated; then None, or the exception that ended it."""
    cancelled: bool = False
    written: list[int] = field(default_factory=list)
    reason: str = "length"
    """Why it ended, in OpenAI's words: "stop" or "length"."""

    def text(self) -> Iterator[str]:
        """Yield the pieces until the end; raise the exception if there was one."""
        while (piece := self.pieces.get()) is not None:
            if isinstance(piece, Exception):
                raise piece
            yield piece


class Engine:
    """Runs requests until it is closed; at most `rows` of them at a time."""

    def __init__(self, handle: Retrofit, tokenizer: Any, *, rows: int = 8) -> None:
        check_count("rows", rows)
        self.handle, self.tokenizer, self.rows = handle, tokenizer, rows
        self._waiting: queue.Queue[Request | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="expire-span-engine")
        self._thread.start()

    def submit(self, request: Request) -> Request:
        self._waiting.put(request)
        return request

    def close(self) -> None:
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        active: list[_Turn] = []
        closing = False
        while not closing or active:
            while len(active) < self.rows and (not self._waiting.empty() or not (active or closing)):
                request = self._waiting.get()
                if request is None:
                    closing = True
                else:
                    active.append(_Turn(self, request))
            active = [turn for turn in active if turn.take()]


class _Turn:
    """One running request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self.steps = self._steps()

    def take(self) -> bool:
        """Read the prompt or generate one token; returns False when the request is done."""
        try:
            next(self.steps)
            return not self.request.cancelled
        except StopIteration:
            self.request.pieces.put(None)
        except Exception as error:  # raised where the text is read; the other requests continue
            self.request.pieces.put(error)
        return False

    def _steps(self) -> Iterator[None]:
        request, decode = self.request, self.engine.tokenizer.decode
        stream = Stream(self.engine.handle)
        stream.read(torch.tensor([request.prompt]))
        yield
        shown, ends = "", self.engine.tokenizer.eos_token_id
        for (token,) in stream.write(request.limit, request.sampling):
            if int(token) == ends:
                request.reason = "stop"
                break
            request.written.append(int(token))
            text = decode(request.written, skip_special_tokens=True)
            cut = min((text.find(s) for s in request.stop if s in text), default=-1)
            whole = text[:cut] if cut >= 0 else text.removesuffix("\ufffd")  # a character may need several tokens
            if len(whole) > len(shown):
                request.pieces.put(whole[len(shown) :])
                shown = whole
            if cut >= 0:
                request.reason = "stop"
                break
            yield
