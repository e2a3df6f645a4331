"""The server's scheduler: continuous batching of the requests that run on one model, each with memory of its own.

One thread runs the model. At most `rows` requests run at a time; the others wait until one is done.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from expire_span.checks import check_count
from expire_span.models.marks import FREE
from expire_span.stream import Prefilled
from expire_span.stream.decoders import model_of
from expire_span.stream.interface import row_of, trimmed

from .batch import Batch
from .pace import PAUSE, Pace
from .requests import Request, Response
from .sessions import Sessions, Snapshot
from .text import TextModel

STOPPED = "the server was stopped before the answer was complete; ask again"
MOST_WAITING = 1024
"""Largest number of requests that wait, unless the scheduler is given another."""


class Busy(RuntimeError):
    """Too many requests wait."""


class Scheduler:
    """Runs requests until it is closed; at most `rows` of them at a time, while at most `waiting` others wait."""

    def __init__(
        self,
        text: TextModel,
        *,
        rows: int = 8,
        waiting: int = MOST_WAITING,
        sessions: Sessions | None = None,
        pause: float = PAUSE,
    ) -> None:
        """sessions: known beginnings of prompts, or None, where every prompt is read whole. A model whose cap evicts living
        memories has none, since what it keeps depends on where the reading was interrupted. pause: seconds for which running
        answers wait at most while a part of a prompt is read, on a CPU."""
        check_count("rows", rows)
        check_count("waiting", waiting)
        self.text, self.rows, self.most_waiting = text, rows, waiting
        self.sessions = None if sessions is None or model_of(text.model).capped else sessions
        self.counts: Counter[str] = Counter()
        """Requests by how they ended, and tokens that were read, were known, and were written."""
        self._changed = threading.Condition()
        """Held by whoever reads or changes the four below."""
        self._waiting: deque[Request] = deque()
        self._questions: deque[tuple[Callable[[Batch], Any], Future[Any]]] = deque()
        self._refusing = self._stopping = False
        self._active: list[Response] = []
        self._batch = Batch(text.model, rows)
        self.pace = Pace.of(text.model, pause)
        self._thread = threading.Thread(target=self._run, daemon=True, name="expire-span-scheduler")
        self._thread.start()

    def submit(self, *requests: Request) -> None:
        """Queue requests, all of them or none: a scheduler that stops or has too many refuses."""
        with self._changed:
            if self._refusing:
                raise RuntimeError(STOPPED)
            waiting = sum(not request.cancelled for request in self._waiting)
            if waiting + len(requests) > self.most_waiting:
                raise Busy(
                    f"{waiting:,} texts wait, of at most {self.most_waiting:,}, got {len(requests)} more; ask later"
                )
            self._waiting.extend(requests)
            self._changed.notify()

    @property
    def running(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        return not self._refusing and self._thread.is_alive()

    def ask(self, question: Callable[[Batch], Any]) -> Future[Any]:
        """Ask something about the batch, in the scheduler's thread between two steps."""
        answer: Future[Any] = Future()
        with self._changed:
            if self._stopping:
                answer.set_exception(RuntimeError(STOPPED))
            self._questions.append((question, answer))
            self._changed.notify()
        return answer

    def refuse(self) -> None:
        """Take no more requests; those that were taken go on."""
        with self._changed:
            self._refusing = True

    def stop(self) -> None:
        """End all requests, running and waiting, after the token that is being computed; does not wait for it."""
        with self._changed:
            self._refusing = self._stopping = True
            self._changed.notify()

    def close(self) -> None:
        """Stop, and wait until the scheduler's thread has ended."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._drop_abandoned()
            self._admit()
            self._answer_questions()
            try:
                self._take_turn()
            except Exception as error:  # of what all rows share, such as a lack of memory in their common step
                self._fail_all(error)
            self._active = [x for x in self._active if not x.done]
        for request in [*(response.request for response in self._active), *self._waiting]:
            request.deliver(RuntimeError(STOPPED))
        self._answer_questions()

    def _answer_questions(self) -> None:
        while self._questions:
            question, answer = self._questions.popleft()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(question(self._batch))
            except Exception as error:  # raised where the answer is waited for
                answer.set_exception(error)

    def _drop_abandoned(self) -> None:
        """End requests that wait and that nobody waits for any more; they never begin."""
        with self._changed:
            gone = [request for request in self._waiting if request.cancelled]
            if gone:
                self._waiting = deque(request for request in self._waiting if not request.cancelled)
        for request in gone:
            request.deliver(None)

    def _admit(self) -> None:
        """Begin requests that wait, as many as there are rows for; waits for one if nothing runs."""
        while len(self._active) < self.rows and (request := self._next()) is not None:
            try:
                self._active.append(Response(self.text, request, self._batch.device))
            except Exception as error:  # raised where its text is read
                request.deliver(error)

    def _next(self) -> Request | None:
        """The request that has waited longest, once there is one; None if others run meanwhile, or the scheduler stops."""
        with self._changed:
            while not (self._waiting or self._active or self._stopping or self._questions):
                self._changed.wait()
            return self._waiting.popleft() if self._waiting and not self._stopping else None

    def _take_turn(self) -> None:
        """Read one chunk of a prompt, so that a long prompt holds up the others by no more, then generate a token for every
        request whose prompt has been read. Prompts that can be read together count as one."""
        for response in self._active:
            if response.request.cancelled:
                self._finish(response)
        most = self.pace.chunk(bool(self._batch.responses))
        for response in [x for x in self._active if x.waits][:1]:
            self._try(response, lambda response=response: self._prefill(response, most))
        if self._batch.responses:
            self._decode()

    def _prefill(self, first: Response, most: int) -> None:
        """Read the next chunk of a prompt, and with it those of others that can be read in the same call; after its last chunk
        a response joins the batch."""
        self._begin(first)
        chunk = first.next_chunk(most)
        if chunk is None:
            assert first.prompt is not None
            return self._batch.join([first], first.prompt)
        group = [first] if first.prompt is not None or chunk.marks is not None else self._read_alike(first, most)
        began = time.perf_counter()
        read = self._read_together(group, len(chunk.tokens)) if len(group) > 1 else None
        if read is None:
            group, read = [first], self._batch.stream.prefill(chunk.tokens, first.prompt, chunk.marks)
        self.pace.note(len(group) * len(chunk.tokens), time.perf_counter() - began)
        for row, response in enumerate(group):
            self._note_read(response, len(chunk.tokens), partial(row_of, read, row))
        if all(x.is_read for x in group):
            return self._batch.join(group, read)
        for row, response in enumerate(group):
            response.prompt = row_of(read, row)
            if response.is_read:
                self._batch.join([response], response.prompt)

    def _begin(self, response: Response) -> None:
        if response.begun:
            return
        found = self._find_beginning(response.request)
        response.begin(found, self._batch.device)
        self.counts["known"] += response.read
        if self.sessions is not None:
            self.sessions.counts["misses" if found is None else "hits"] += 1

    def _read_alike(self, first: Response, most: int) -> list[Response]:
        """Responses that read as many tokens as the first one, all from their beginning, at most so many tokens together. With
        sessions, of those that read the same tokens one goes ahead, and the others find what it has read."""
        group, size = [first], len(first.next_chunk(most).tokens)  # type: ignore[union-attr]
        seen = {tuple(first.request.prompt[:size])}
        for other in self._active:
            if (len(group) + 1) * size > most:
                break
            if other.begun or not other.waits or other.request.cancelled or not other.reads_plainly(size, most):
                continue
            own = tuple(other.request.prompt[:size])
            if self.sessions is not None and (own in seen or self._find_beginning(other.request) is not None):
                continue
            seen.add(own)
            self._begin(other)
            group.append(other)
        return group

    def _read_together(self, group: list[Response], size: int) -> Prefilled | None:
        """The first tokens of all of these; None where that fails, so that each is tried alone."""
        try:
            return self._batch.stream.prefill_together([x.request.prompt[:size] for x in group])
        except (ValueError, RuntimeError, MemoryError):
            return None

    def _note_read(self, response: Response, tokens: int, read: Callable[[], Prefilled]) -> None:
        """Count the tokens of a chunk, and keep what was read where a later prompt may go on."""
        response.read += tokens
        self.counts["read"] += tokens
        if response.read in response.points:
            self._remember(response.request, response.request.prompt[: response.read], read)

    def _find_beginning(self, request: Request) -> Snapshot | None:
        """The longest beginning of the prompt that is known by now."""
        if self.sessions is None:
            return None
        found, begun = self.sessions.find(request.owner, request.prompt, request.chat.marks, load=False), request.begun
        return max((x for x in (found, begun) if x is not None), key=lambda x: x.length, default=None)

    def _remember(self, request: Request, tokens: list[int], read: Callable[[], Prefilled]) -> None:
        """Keep what was read up to a point of the prompt."""
        if self.sessions is not None:
            marks, places = request.chat.marks, request.chat.told(len(tokens))
            marks = None if marks is None else marks[: len(tokens)]
            with suppress(RuntimeError, MemoryError):  # without room for it, it is read again next time
                lasting = len(tokens) == max(request.chat.points, default=0)
                self.sessions.put(request.owner, tokens, marks, lambda: trimmed(read()), places, lasting=lasting)

    def _remember_answer(self, response: Response) -> None:
        """Keep what a row has read: the prompt and the answer, as far as it was fed."""
        request, row = response.request, response.row
        if self.sessions is None or row is None:
            return
        tokens, marks = request.prompt + response.fed, request.chat.marks
        marks = None if marks is None else marks + [FREE] * len(response.fed)
        places, read = (
            request.chat.told(len(request.prompt), len(response.fed)),
            partial(self._batch.stream.snapshot, row),
        )
        with suppress(RuntimeError, MemoryError):
            request.session = self.sessions.put(request.owner, tokens, marks, read, places, lasting=True)

    def _decode(self) -> None:
        """One decode step of the batch."""
        self._batch.draw()
        for response in self._batch.responses:
            self._try(response, lambda response=response: self._take(response))
        self._batch.step()

    def _take(self, response: Response) -> None:
        request, most = response.request, self._batch.stream.length
        if not response.take(response.token):
            self._finish(response)
        elif most is not None and len(request.prompt) + request.written > most:
            raise ValueError(f"the model reads at most {most:,} tokens, prompt and answer together; ask for fewer")

    def _fail_all(self, error: Exception) -> None:
        responses = self._batch.responses
        self._batch.reset()
        for response in responses:
            self._finish(response, error)

    def _try(self, response: Response, work: Callable[[], Any]) -> None:
        """Do work for one response. An exception ends it and is raised where its text is read; the others continue."""
        try:
            work()
        except Exception as error:
            self._finish(response, error)

    def _finish(self, response: Response, error: Exception | None = None) -> None:
        """End a request, with the exception that ended it if there was one."""
        if response.done:
            return
        response.done = True
        request = response.request
        self.counts["failed" if error else "cancelled" if request.cancelled else request.reason] += 1
        self.counts["written"] += request.written
        if error is None:
            self._remember_answer(response)
        request.deliver(error)
        if response.row is not None:
            self._batch.leave(response)
