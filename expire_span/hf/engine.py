"""The server's engine: several requests on one model, each with a stream and memory of its own, one token in turn.

One thread runs the model. At most `rows` requests run at a time; the others wait until one is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from expire_span.checks import check_count
from expire_span.sampling import Sampling

from .handle import Retrofit
from .loading import end_tokens
from .streams import CHUNK, Stream
from .writing import TextWriter


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and the function that its text is given to piece by piece."""

    prompt: list[int]
    limit: int
    sampling: Sampling
    stop: tuple[str, ...]
    deliver: Callable[[str | Exception | None], None]
    """Called by the engine's thread with pieces of text; at last with None, or with the exception that ended the request."""
    cancelled: bool = False
    """Set by the caller if nobody waits for the text any more."""
    written: int = 0
    """Number of tokens drawn so far."""
    reason: str = "length"
    """Why it ended, in OpenAI's words: "stop" or "length"."""


class Engine:
    """Runs requests until it is closed; at most `rows` of them at a time."""

    def __init__(self, handle: Retrofit, tokenizer: Any, *, rows: int = 8) -> None:
        check_count("rows", rows)
        self.handle, self.tokenizer, self.rows = handle, tokenizer, rows
        self._waiting: queue.Queue[Request | None] = queue.Queue()
        self.ends = end_tokens(handle.model, tokenizer)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="expire-span-engine")
        self._thread.start()

    def submit(self, request: Request) -> Request:
        self._waiting.put(request)
        return request

    def stop(self) -> None:
        """End all requests, running and waiting, after the token that is being computed; does not wait for it."""
        self._stopping = True
        self._waiting.put(None)

    def close(self) -> None:
        """Stop, and wait until the engine's thread has ended."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        active: list[_Turn] = []
        while not self._stopping:
            while len(active) < self.rows and not (active and self._waiting.empty()):
                request = self._waiting.get()
                if request is None:
                    break
                active.append(_Turn(self, request))
            active = [turn for turn in active if turn.take()]
        left = [turn.request for turn in active]
        while not self._waiting.empty():
            left.append(self._waiting.get())  # type: ignore[arg-type]
        for request in left:
            if request is not None:
                request.deliver(RuntimeError("the server was stopped before the answer was complete; ask again"))


class _Turn:
    """One running request."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self.engine, self.request = engine, request
        self.steps = self._steps()

    def take(self) -> bool:
        """Read a part of the prompt or generate one token; returns False when the request is done."""
        try:
            if not self.request.cancelled:
                next(self.steps)
                return True
            self.request.deliver(None)
        except StopIteration:
            self.request.deliver(None)
        except Exception as error:  # raised where the text is read; the other requests continue
            self.request.deliver(error)
        return False

    def _steps(self) -> Iterator[None]:
        request = self.request
        stream, writer = Stream(self.engine.handle), TextWriter(self.engine.tokenizer, request.stop)
        for part in torch.tensor([request.prompt]).split(CHUNK, dim=1):  # a long prompt must not hold up other requests
            stream.read(part)
            yield
        for (token,) in stream.write(request.limit, request.sampling):
            if int(token) in self.engine.ends:
                request.reason = "stop"
                break
            request.written += 1
            if text := writer.add(int(token)):
                request.deliver(text)
            if writer.stopped:
                request.reason = "stop"
                return
            yield
        if text := writer.finish():
            request.deliver(text)
