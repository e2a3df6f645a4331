"""Where a picture comes from: a run's model, which can read new text, or a trace that was written before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from expire_span.agent_configs import AgentRunConfig
from expire_span.checkpoint import list_checkpoints, load_model
from expire_span.config import RunConfig
from expire_span.generate import START, Sampling
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, UserError
from expire_span.shipped import SAMPLE
from expire_span.tasks.task import Task, build_task

from .agent import AgentReader
from .episodes import is_twin, replay_twin
from .limit import WHOLE, Cut, trace_cut
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
    model: Decoder
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

    @property
    def reads_text(self) -> bool:
        return self.config.task.kind in ("text", "words")

    @property
    def generates(self) -> bool:
        """Whether it can write text."""
        return self.config.model.vocab == 256 and self.reads_text

    def encode(self, raw: bytes) -> Tensor:
        """Tokens [T] of text as this model knows them."""
        kind = self.config.task.kind
        if kind == "text":
            tokens = list(raw)
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

            return [label(byte) for byte in tokens.tolist()]
        return self.task.show(tokens)

    def tracer(self) -> Tracer:
        kind = self.config.task.kind
        return Tracer(self.model, name=self.name, task=kind, about=about_task(self.config), show=self.show)

    def trace_text(self, raw: bytes, cut: Cut = WHOLE) -> Iterator[Line]:
        """The trace of a text; `cut` shortens lives."""
        return self._read(self.encode(raw), {}, cut)

    def trace_sample(self, count: int | None = None, cut: Cut = WHOLE, number: int = 0) -> Iterator[Line]:
        """The trace of the task's own sample, or of its first tokens. There is one; `number` is of agents."""
        if self.own_sample is not None:
            return self._read(self.encode(self.own_sample)[:count], {}, cut)
        tokens, answers = sample_of(self.task, self.config)
        pictures = replay_twin(self.task, tokens, self.config.seed) if is_twin(self.task) else None
        return self._read(tokens[:count], answers, cut, pictures)

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

        with self.lock:  # the cut acts on the model itself, so nobody else reads meanwhile
            lines = trace_cut(self.model, cut, read)
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


def open_reader(run: RunFolder) -> Reader | AgentReader:
    """The model of a run, or one sentence that says why there is none."""
    if not list_checkpoints(run):
        raise UserError(
            f"run {run.path} has no checkpoint yet, so there is no model to look into; wait, or train it on"
        )
    return AgentReader.open(run) if isinstance(run.config, AgentRunConfig) else Reader.open(run)


def is_trace(path: Path) -> bool:
    """Whether a name means a trace: any file, while a run is a folder."""
    return path.is_file()
