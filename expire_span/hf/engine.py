"""The server's engine: several requests on one model, each with memory of its own; all that write get a token in one step.

One thread runs the model. At most `rows` requests run at a time; the others wait until one is done.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from expire_span.checks import check_count

from .answers import Answer, Request
from .decoding import can_decode
from .handle import Retrofit
from .loading import end_tokens
from .rows import Rows

STOPPED = "the server was stopped before the answer was complete; ask again"


class AnswerEngine:
    """Runs requests until it is closed; at most `rows` of them at a time."""

    def __init__(self, handle: Retrofit, tokenizer: Any, *, rows: int = 8) -> None:
        check_count("rows", rows)
        self.handle, self.tokenizer, self.rows = handle, tokenizer, rows
        self.ends = end_tokens(handle.model, tokenizer)
        self._waiting: queue.Queue[Request | None] = queue.Queue()
        self._active: list[Answer] = []
        self._together = Rows(handle, rows) if can_decode(handle) else None
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
        while not self._stopping:
            self._admit()
            try:
                self._take_turn()
            except Exception as error:  # of what all rows share, such as a lack of memory in their common step
                self._fail_together(error)
            self._active = [x for x in self._active if not x.done]
        left: list[Request | None] = [answer.request for answer in self._active]
        while not self._waiting.empty():
            left.append(self._waiting.get())
        for request in left:
            if request is not None:
                request.deliver(RuntimeError(STOPPED))

    def _admit(self) -> None:
        """Begin requests that wait, as many as there are rows for; waits for one if nothing runs."""
        while len(self._active) < self.rows and not (self._active and self._waiting.empty()):
            request = self._waiting.get()
            if request is None:
                return
            try:
                self._active.append(Answer(self.handle, self.tokenizer, self.ends, request))
            except Exception as error:  # raised where its text is read
                request.deliver(error)

    def _take_turn(self) -> None:
        """Read one part of one prompt, so that a long prompt holds up the others by no more, then write a token of every
        answer whose prompt has been read."""
        for answer in self._active:
            if answer.request.cancelled:
                self._finish(answer)
        for answer in [x for x in self._active if x.reading][:1]:
            self._try(answer, answer.read)
        for answer in [x for x in self._active if not (x.done or x.reading) and x.row is None]:
            self._try(answer, lambda answer=answer: self._write_alone(answer))
        self._write_together()

    def _write_alone(self, answer: Answer) -> None:
        """Let an answer join the rows; if it cannot, or not yet, write its next token by a pass of its own."""
        if self._together is not None and answer.stream.has_first_tokens:
            self._together.join(answer)
        elif not answer.write():
            self._finish(answer)

    def _write_together(self) -> None:
        rows = self._together
        if rows is None or not rows.answers:
            return
        rows.draw()
        for answer in rows.answers:
            self._try(answer, lambda answer=answer: answer.take(answer.token) or self._finish(answer))
        rows.advance()

    def _fail_together(self, error: Exception) -> None:
        assert self._together is not None
        answers = self._together.answers
        self._together.reset()
        for answer in answers:
            self._finish(answer, error)

    def _try(self, answer: Answer, work: Callable[[], Any]) -> None:
        """Do work for one answer. An exception ends it and is raised where its text is read; the others continue."""
        try:
            work()
        except Exception as error:
            self._finish(answer, error)

    def _finish(self, answer: Answer, error: Exception | None = None) -> None:
        """End a request, with the exception that ended it if there was one."""
        if answer.done:
            return
        answer.done = True
        answer.request.deliver(error)
        if answer.row is not None and self._together is not None:
            self._together.leave(answer)
