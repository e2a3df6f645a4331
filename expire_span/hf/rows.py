"""Answers that are written together: one token of each per step of the model; they join and leave while others go on."""

from __future__ import annotations

import torch

from expire_span.sampling import draw_rows

from .answers import Answer
from .decoding import RetrofitEngine
from .handle import Retrofit


class Rows:
    """At most `most` answers, each in a row of one `RetrofitEngine`.

    On a GPU the engine always has `most` rows, since a step is a recorded graph of that size and rows cost little. On a CPU
    it has as many rows as there are answers, since every row costs time there.
    """

    def __init__(self, handle: Retrofit, most: int) -> None:
        self.handle, self.most = handle, most
        self.answers: list[Answer] = []
        self._fixed = next(handle.model.parameters()).device.type == "cuda"
        self._engine: RetrofitEngine | None = None

    @property
    def engine(self) -> RetrofitEngine:
        """The engine of all rows, made when the first answer joins."""
        if self._engine is None:
            self._engine = RetrofitEngine(self.handle, self.most if self._fixed else 1)
        return self._engine

    def join(self, answer: Answer) -> None:
        """Move an answer's memories into a free row; its first token here is drawn from the logits after its prompt."""
        assert answer.stream.logits is not None
        if all(self.engine.active):
            self._resize(self.engine.rows + 1)
        row = self.engine.active.index(False)
        self.engine.begin(answer.stream.cache, answer.stream.logits, [row])
        answer.row = row
        self.answers.append(answer)

    def leave(self, answer: Answer) -> None:
        self.engine.release([_row(answer)])
        self.answers = [x for x in self.answers if x is not answer]
        answer.row = None

    def reset(self) -> None:
        """Drop everything, after a step that failed in the middle."""
        for answer in self.answers:
            answer.row = None
        self.answers, self._engine = [], None

    def draw(self) -> None:
        """Draw the next `token` of every answer. The host waits for the device."""
        rows = [_row(answer) for answer in self.answers]
        samplings = [answer.request.sampling for answer in self.answers]
        drawn = draw_rows(self.engine.logits[rows], samplings, [answer.generator for answer in self.answers]).tolist()
        for answer, token in zip(self.answers, drawn):
            answer.token = token

    def advance(self) -> None:
        """Let every answer read the token that it has drawn last, all in one step."""
        if not self.answers:
            return
        if not self._fixed and not all(self.engine.active):
            self._resize(len(self.answers))
        tokens = [0] * self.engine.rows  # a free row reads anything; an answer that joins replaces its memories
        for answer in self.answers:
            tokens[_row(answer)] = answer.token
        self.engine.tokens.copy_(torch.tensor(tokens))
        self.engine.advance(None)

    def _resize(self, size: int) -> None:
        """Move the answers into the first rows of an engine with `size` rows, in their order; the others are free."""
        kept = [_row(answer) for answer in self.answers]
        picked = kept + kept[:1] * (size - len(kept))  # copies of a row, which are emptied at once
        self._engine = self.engine.selected(torch.tensor(picked))
        for row, answer in enumerate(self.answers):
            answer.row = row
        self._engine.release(list(range(len(kept), size)))


def _row(answer: Answer) -> int:
    assert answer.row is not None, "the answer has not joined"
    return answer.row
