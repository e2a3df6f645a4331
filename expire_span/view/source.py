"""Readers of runs: the model of a run, which can read new text, an agent, or a retrofitted model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expire_span.agent_configs import AgentRunConfig
from expire_span.checkpoint import list_checkpoints, load_model
from expire_span.config import RunConfig
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, UserError
from expire_span.shipped import SAMPLE
from expire_span.tasks.contract import Task
from expire_span.tasks.registry import build_task
from expire_span.tasks.tokens import Tokenizer

from .agent import AgentReader, about_world
from .episodes import LEGENDS, is_twin, replay_twin
from .reader import TextReader, refuse_empty
from .sample import sample_of
from .trace import Line
from .tracer import Tracer, probe_spans

if TYPE_CHECKING:  # needs transformers
    from .adapter import AdapterReader

AnyReader = TextReader | AgentReader


def about_task(config: RunConfig | AgentRunConfig) -> str:
    """The task in one sentence: the first line of its settings' documentation."""
    if isinstance(config, AgentRunConfig):
        return about_world(config.task.env)
    if config.task.kind == "text":  # the documentation of its settings describes files, not the task
        return f"Predict the next {'token' if getattr(config.task, 'tokenizer', '') else 'byte'} of a text."
    return (type(config.task).__doc__ or "").strip().splitlines()[0]


class Reader(TextReader):
    """The model of a run on a supervised task."""

    def __init__(self, name: str, model: Decoder, config: RunConfig, own_sample: bytes | None = None) -> None:
        """own_sample: a sample text in the run folder, used so that the data itself need not be there; None takes the
        task's."""
        super().__init__()
        self.name, self.config, self.own_sample = name, config, own_sample
        self.model: Decoder = model
        kind = config.task.kind
        self.vocabulary = kind
        self.reads_text = kind in ("text", "words")
        self.generates = kind == "text" and config.model.vocab == 256
        self._task: Task | None = None

    @classmethod
    def open(cls, run: RunFolder) -> Reader:
        """Load the newest intact checkpoint; the data is opened only when a sample is needed."""
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
        """The tokenizer of a run on text; None if its tokens are bytes."""
        path = getattr(self.config.task, "tokenizer", "")
        return Tokenizer(path) if path else None

    def encode(self, raw: bytes) -> Tensor:
        kind = self.config.task.kind
        if kind == "text":
            tokens = list(raw) if self.tokenizer is None else self.tokenizer.encode(raw)[0].tolist()
        elif kind == "words":
            tokens = self._words(raw)
        else:
            raise UserError(f"a run of task {kind} reads no text; look at the task's sample instead")
        refuse_empty(tokens)
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
        about = " ".join(filter(None, [about_task(self.config), LEGENDS.get(kind)]))
        return Tracer(self.model, name=self.name, task=kind, about=about, show=self.show, probed=self._probed)

    @cached_property
    def _probed(self) -> tuple[int, bool]:
        return probe_spans(self.model)

    def sample(self) -> tuple[Tensor, dict[int, int], list[Line] | None]:
        """The task's sample; for a grid world, with the pictures of its episode."""
        if self.own_sample is not None:
            return self.encode(self.own_sample), {}, None
        tokens, answers = sample_of(self.task, self.config)
        return tokens, answers, replay_twin(self.task, tokens, self.config.seed) if is_twin(self.task) else None


def open_reader(run: RunFolder) -> Reader | AgentReader:
    """The reader of a run. UserError if it has no checkpoint yet."""
    if not list_checkpoints(run):
        raise UserError(
            f"run {run.path} has no checkpoint yet, so there is no model to look into; wait, or train it on"
        )
    return AgentReader.open(run) if isinstance(run.config, AgentRunConfig) else Reader.open(run)


def open_adapter(folder: Path, model: str | None = None) -> AdapterReader:
    """A retrofitted model; needs the extra hf."""
    from .adapter import AdapterReader

    return AdapterReader.open(folder, model)
