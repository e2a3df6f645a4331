"""Continuous batching: requests that get a token each in one decode step; they join and leave while others go on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expire_span.sampling import draw_rows
from expire_span.stream import Prefilled, Stream
from expire_span.stream.decoders import model_of
from expire_span.stream.tokens import send_to_host

from .requests import Response


class Batch:
    """At most `most` responses, each in a row of one `Stream`.

    On a GPU the stream always has `most` rows, since a step is a recorded graph of that size and rows cost little. On a CPU it
    has as many rows as there are responses, since every row costs time there.
    """

    def __init__(self, model: Any, most: int) -> None:
        self.model, self.most = model, most
        self.responses: list[Response] = []
        self.device = model_of(model).device
        self._fixed = self.device.type == "cuda"
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream:
        """The stream of all rows, made when it is first needed."""
        if self._stream is None:
            self._stream = Stream(self.model, self.most if self._fixed else 1, static_shapes=True)
        return self._stream

    def join(self, responses: list[Response], read: Prefilled) -> None:
        """Give responses, whose prompts have been read, free rows."""
        missing = len(responses) - self.stream.active.count(False)
        if missing > 0:
            self._resize(self.stream.rows + missing)
        for response, row in zip(responses, self.stream.join_together(read)):
            response.row, response.prompt = row, None
            self.responses.append(response)

    def leave(self, response: Response) -> None:
        self.stream.leave(_row(response))
        self.responses = [x for x in self.responses if x is not response]
        response.row = None

    def reset(self) -> None:
        """Drop everything, after a step that failed in the middle."""
        for response in self.responses:
            response.row = None
        self.responses, self._stream = [], None

    @property
    def overlaps(self) -> bool:
        """Whether rows read their next token as soon as it is drawn, before the host knows it. The step then runs while the
        host writes text and prepares the next one; a row whose response ends has read one token more. On a CPU a step would
        make the host wait, and a table of positions may end there."""
        return self._fixed and self.stream.length is None

    def draw(self) -> None:
        """Draw the next `token` of every response. The host waits for these, but not for the step where steps overlap."""
        if self.overlaps:
            self._fit()
        logits = self.stream.logits[[_row(x) for x in self.responses]]
        samplings = [x.request.sampling for x in self.responses]
        drawn = draw_rows(logits, samplings, [x.generator for x in self.responses])
        flight = send_to_host(drawn)
        if self.overlaps:
            self._feed(drawn)
        for response, token in zip(self.responses, flight.collect([True] * len(drawn)).tokens.tolist()):
            response.token = token
            if self.overlaps:
                response.fed.append(token)

    def step(self) -> None:
        """Let every row read the token that was drawn last for it, all in one decode step, unless it has read it already."""
        if not self.responses or self.overlaps:
            return
        self._fit()
        for response in self.responses:
            response.fed.append(response.token)
        self._feed(torch.tensor([response.token for response in self.responses], device=self.device))

    def _feed(self, drawn: Tensor) -> None:
        """One decode step: every response's row reads its token."""
        tokens = drawn.new_zeros(self.stream.rows)  # an idle row reads anything
        tokens[[_row(x) for x in self.responses]] = drawn
        self.stream.feed(tokens)

    def _fit(self) -> None:
        """On a CPU, drop the rows of responses that have left."""
        if not self._fixed and not all(self.stream.active):
            self._resize(len(self.responses))

    def _resize(self, size: int) -> None:
        """Move the responses into the first rows of a stream with `size` rows, in their order; the others are idle."""
        kept = [_row(response) for response in self.responses]
        self._stream = self.stream.fork(kept + (kept or [0])[:1] * (size - len(kept)))
        for row, response in enumerate(self.responses):
            response.row = row
        for row in range(len(kept), size):
            self._stream.leave(row)


def _row(response: Response) -> int:
    assert response.row is not None, "the response has not joined"
    return response.row
