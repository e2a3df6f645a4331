"""Readers: a loaded model that reads or generates text and returns traces; several threads may use one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from expire_span.generate import START, Sampling
from expire_span.runs import UserError
from expire_span.tasks.contract import Codec

from .limit import WHOLE, Cut, trace_cut
from .trace import Line
from .tracer import Tracer


class TextReader(ABC):
    """A lock lets one thread at a time use the model. `model` holds the modules that predict spans, which a cut changes
    temporarily."""

    name: str
    model: nn.Module
    codec: Codec
    plays = False
    """Whether it plays episodes."""
    reads_text = True
    generates = True
    """Whether it can generate text."""
    vocabulary = "pieces"

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def encode(self, raw: bytes) -> Tensor:
        """The tokens [T] of a text in this model's vocabulary."""
        tokens = self.codec.encode(raw)
        if not len(tokens):
            raise UserError("the text is empty, and there is nothing to remember; give at least one character")
        return torch.tensor(tokens, dtype=torch.long)

    @abstractmethod
    def tracer(self) -> Tracer:
        """A new tracer, which has read nothing yet."""

    @abstractmethod
    def sample(self) -> tuple[Tensor, dict[int, int], list[Line] | None]:
        """Tokens of a sample, the target tokens by position where the task scores some, and further fields for each step."""

    def trace_text(self, raw: bytes, cut: Cut = WHOLE, count: int | None = None) -> Iterator[Line]:
        """The trace of a text, or of its first `count` tokens; `cut` shortens lifetimes."""
        return self._read(self.encode(raw)[:count], {}, cut)

    def trace_sample(self, count: int | None = None, cut: Cut = WHOLE, number: int | None = None) -> Iterator[Line]:
        """The trace of the sample, or of its first `count` tokens. number: ignored here, chooses an agent's episode."""
        tokens, answers, extras = self.sample()
        return self._read(tokens[:count], answers, cut, extras)

    def _read(
        self, tokens: Tensor, answers: dict[int, int], cut: Cut, extras: list[Line] | None = None
    ) -> Iterator[Line]:
        if not cut.active:
            tracer = self.tracer()
            yield tracer.header()
            yield from self._in_turn(tracer.read(tokens, answers, extras))
            return

        def read() -> list[Line]:
            tracer = self.tracer()
            return [tracer.header(), *tracer.read(tokens, answers, extras)]

        with self.lock:  # a cut changes the model itself, so no other thread may use it meanwhile
            lines = trace_cut(self.model, cut, read)
        yield from lines

    def generate(self, prompt: bytes, sampling: Sampling, max_tokens: int) -> Iterator[Line]:
        """One trace of the prompt and of the text that the model generates after it."""
        tokens = self.encode(prompt or START)
        tracer = self.tracer()
        yield tracer.header()
        yield from self._in_turn(tracer.read(tokens))
        yield from self._in_turn(_on_one_thread(tracer.generate(sampling, max_tokens)))

    def _in_turn(self, steps: Iterator[Line]) -> Iterator[Line]:
        while True:
            with self.lock:
                step = next(steps, None)
            if step is None:
                return
            yield step


def _on_one_thread(steps: Iterator[Line]) -> Iterator[Line]:
    """The same steps, each computed with one CPU thread.

    A single token is too little work to split: threads that wait for one another take longer than one alone, up to ten times
    as long on a busy machine.
    """
    threads = torch.get_num_threads()
    while True:
        torch.set_num_threads(1)
        try:
            step = next(steps, None)
        finally:
            torch.set_num_threads(threads)
        if step is None:
            return
        yield step
