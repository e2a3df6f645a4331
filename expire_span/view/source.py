"""Where a picture comes from: a run's model, which can read new text, or a trace that was written before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from expire_span.checkpoint import list_checkpoints, load_model
from expire_span.config import RunConfig
from expire_span.generate import START, Sampling
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, UserError
from expire_span.shipped import SAMPLE
from expire_span.tasks.task import Task, build_task
from expire_span.tasks.tokens import Tokenizer

from .limit import limit_spans
from .sample import sample_of
from .trace import Line
from .tracer import Tracer


def about_task(config: RunConfig) -> str:
    """The task in one sentence: the first line of its settings' documentation."""
    return (type(config.task).__doc__ or "").strip().splitlines()[0]


@dataclass
class Reader:
    """The model of a run, ready to read. Several threads may ask; the model serves one step at a time."""

    name: str
    decoder: Decoder
    config: RunConfig
    own_sample: bytes | None = None
    """Text that lies in the run folder and is read as the sample, so that the data itself need not be there."""
    _task: Task | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, run: RunFolder) -> Reader:
        """From the newest sound checkpoint; the data itself is opened only when a sample is asked for."""
        decoder, config = load_model(run)
        sample = run.path / SAMPLE
        return cls(run.name, decoder, config, sample.read_bytes() if sample.is_file() else None)

    @property
    def task(self) -> Task:
        if self._task is None:
            self._task = build_task(self.config.task)
        return self._task

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """What turns text into tokens, where a run of text does not read bytes."""
        path = getattr(self.config.task, "tokenizer", "")
        return Tokenizer(path) if path else None

    @property
    def reads_text(self) -> bool:
        return self.config.task.kind in ("text", "words")

    def encode(self, raw: bytes) -> Tensor:
        """Tokens [T] of text as this model knows them."""
        kind = self.config.task.kind
        if kind == "text":
            tokens = list(raw) if self.tokenizer is None else self.tokenizer.encode(raw)[0].tolist()
        elif kind == "words":
            tokens = self._words(raw)
        else:
            raise UserError(f"a run of task {kind} reads no text; look at the task's sample instead")
        if not tokens:
            raise UserError("the text is empty, and there is nothing to remember; give at least one character")
        return torch.tensor(tokens, dtype=torch.long)

    def _words(self, raw: bytes) -> list[int]:
        from expire_span.tasks.words import Words, split_words

        assert isinstance(self.task, Words)
        places = {word: n for n, word in enumerate(self.task.names)}
        return [places.get(word, 0) for word in split_words(raw.decode("utf-8", errors="replace"))]

    def show(self, tokens: Tensor) -> list[str]:
        if self.config.task.kind == "text":  # needs no data, which may have moved
            from expire_span.tasks.text import label

            shown = label if self.tokenizer is None else self.tokenizer.label
            return [shown(token) for token in tokens.tolist()]
        return self.task.show(tokens)

    def tracer(self) -> Tracer:
        kind = "tokens" if self.tokenizer is not None else self.config.task.kind
        return Tracer(self.decoder, name=self.name, task=kind, about=about_task(self.config), show=self.show)

    def trace_text(self, raw: bytes, limit: float | None = None) -> Iterator[Line]:
        """The trace of a text; `limit` cuts all spans to so many steps."""
        return self._read(self.encode(raw), {}, limit)

    def trace_sample(self, count: int | None = None, limit: float | None = None) -> Iterator[Line]:
        """The trace of the task's own sample, or of its first tokens."""
        if self.own_sample is not None:
            return self._read(self.encode(self.own_sample)[:count], {}, limit)
        tokens, answers = sample_of(self.task, self.config)
        return self._read(tokens[:count], answers, limit)

    def _read(self, tokens: Tensor, answers: dict[int, int], limit: float | None) -> Iterator[Line]:
        if limit is None:
            tracer = self.tracer()
            yield tracer.header()
            yield from self._in_turn(tracer.read(tokens, answers))
            return
        with self.lock, limit_spans(self.decoder, limit):  # the clamp acts on all, so nobody else reads meanwhile
            tracer = self.tracer()
            lines = [tracer.header() | {"max_span": limit}, *tracer.read(tokens, answers)]
        yield from lines

    def generate(self, prompt: bytes, sampling: Sampling, max_tokens: int) -> Iterator[Line]:
        """The prompt, then what the model writes after it, as one trace."""
        tokens = self.encode(prompt or START)
        tracer = self.tracer()
        yield tracer.header()
        yield from self._in_turn(tracer.read(tokens))
        yield from self._in_turn(tracer.generate(sampling, max_tokens))

    def _in_turn(self, steps: Iterator[Line]) -> Iterator[Line]:
        while True:
            with self.lock:
                step = next(steps, None)
            if step is None:
                return
            yield step


def open_reader(run: RunFolder) -> Reader:
    """The model of a run, or one sentence that says why there is none."""
    if not list_checkpoints(run):
        raise UserError(
            f"run {run.path} has no checkpoint yet, so there is no model to look into; wait, or train it on"
        )
    return Reader.open(run)


def is_trace(path: Path) -> bool:
    """Whether a name means a trace: any file, while a run is a folder."""
    return path.is_file()
