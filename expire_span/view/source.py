"""Readers of runs: the model of a run, which can read new text, an agent, or a retrofitted model."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from expire_span.checkpoint import list_checkpoints, load_model
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import RunConfig
from expire_span.shipped import SAMPLE
from expire_span.tasks.contract import Task
from expire_span.tasks.registry import build_codec, build_task

from .episodes import LEGENDS, is_twin, replay_twin
from .memory_log import MemoryFacts
from .reader import TextReader
from .sample import sample_of
from .trace import Line
from .tracer import Tracer, facts_of

if TYPE_CHECKING:  # needs transformers
    from .adapter import AdapterReader
    from .agent import AgentReader

    AnyReader = TextReader | AgentReader


def about_task(config: RunConfig) -> str:
    """The task in one sentence: the first line of its settings' documentation."""
    return (type(config.task).__doc__ or "").strip().splitlines()[0]


class Reader(TextReader):
    """The model of a run on a supervised task."""

    def __init__(self, name: str, model: Decoder, config: RunConfig, own_sample: bytes | None = None) -> None:
        """own_sample: a sample text in the run folder, used so that the data itself need not be there; None takes the
        task's."""
        super().__init__()
        self.name, self.config, self.own_sample = name, config, own_sample
        self.model: Decoder = model
        self.vocabulary, self.codec = config.task.kind, build_codec(config.task)
        self.reads_text = self.codec.unit != "symbol"
        self.generates = self.codec.unit == "byte"
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

    def tracer(self) -> Tracer:
        kind = self.config.task.kind
        about = " ".join(filter(None, [about_task(self.config), LEGENDS.get(kind)]))
        return Tracer(self.model, name=self.name, task=kind, about=about, codec=self.codec, facts=self._facts)

    @cached_property
    def _facts(self) -> MemoryFacts:
        return facts_of(self.model)

    def sample(self) -> tuple[Tensor, dict[int, int], list[Line] | None]:
        """The task's sample; for a grid world, with the pictures of its episode."""
        if self.own_sample is not None:
            return self.encode(self.own_sample), {}, None
        tokens, answers = sample_of(self.task, self.config.seed)
        return tokens, answers, replay_twin(self.task, tokens, self.config.seed) if is_twin(self.task) else None


def open_reader(run: RunFolder) -> AnyReader:
    """The reader of a run. UserError if it has no checkpoint yet."""
    if not list_checkpoints(run):
        raise UserError(
            f"run {run.path} has no checkpoint yet, so there is no model to look into; wait, or train it on"
        )
    return run.config.kind.load("reader").open(run)


def open_adapter(folder: Path, model: str | None = None) -> AdapterReader:
    """A retrofitted model; needs the extra hf."""
    from .adapter import AdapterReader

    return AdapterReader.of_folder(folder, model)
