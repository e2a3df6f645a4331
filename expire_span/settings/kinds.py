"""The kinds of run: supervised training, an agent, a retrofit. Standard library only.

This is the only place that tells them apart. A `RunConfig` knows its kind, and every command asks that for what differs: where
its code is, what its things are called, and what cannot be done with it. `tests/project/test_imports.py` checks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from .agent import AgentTrainConfig, EnvTask, PolicyConfig
from .models import DecoderConfig
from .retrofit import BaseModel, DistillConfig, RetrofitTask
from .tasks import TaskConfig
from .train import TrainConfig


@dataclass(frozen=True)
class RunKind:
    """What differs between kinds of run. Code is named as module:name inside the package, and is imported when it is needed."""

    task: Any
    """Settings of its tasks: a dataclass, or a union of some."""
    model: Any
    train: Any
    trainer: str
    """Module with `resume(run, allow_changed_data=)` and, where there are recipes, `train(config, path, ...)`."""
    command: str
    """Module of the command line: usual options, `evaluate(run, command)`, and `tell(run, result)`, the result in words."""
    reader: str
    """Class that opens a run to trace what it remembers."""
    learner: str = ""
    """Class that learns; see train/loop.py."""
    module: str = ""
    """Class of the model that its settings describe."""
    comparison: str = ""
    """Module with what is particular to comparisons: `survey(config)`, `describe_length(config)`, `describe_score(...)`."""
    about: str = ""
    """Function that describes a task in one sentence."""
    score: str = ""
    """Label of the score's axis; empty asks the task."""
    eval_options: tuple[str, ...] = ()
    """Options of eval that other kinds do not have."""
    called: str = "of task {task.kind}, not an agent"
    """What a run is, after "run X is"."""
    place: str = "task {task.kind}"
    """What it learns from, for the head of a page."""
    model_word: str = "decoder, reads the same data"
    """What compared memory systems are the memory of, after "of the same"."""
    intro: str = "A language model"
    """The model, as the first words of a report's introduction."""
    promise: str = (
        "A language model normally keeps every token it has read. This one decides, when it reads a token, how many steps that "
        "token"
    )
    """The rest of that introduction, for a model with learned spans, up to "is worth remembering"."""
    piece: str = "token"
    """What one memory is of."""
    sequence: str = "sequence"
    """What one row reads."""
    loss: tuple[str, str] = ("Loss of the task, nats per scored token.", "nats")
    """Caption and unit of the loss."""
    valid: str = "on the valid split"
    """Where the score is measured during training."""
    trained_on: str = "; train --init-from {path} trains its weights on"
    """What else can be done with a finished run."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Options that have no default, each with what it stands for and an example."""
    cannot: Mapping[str, str] = field(default_factory=dict)
    """What cannot be done with such a run, each with the sentence that says so."""

    @property
    def hints(self) -> dict[str, Any]:
        """The types of the three parts of its settings."""
        return {"task": self.task, "model": self.model, "train": self.train}

    def load(self, name: str) -> Any:
        """The module, class or function that the field `name` names."""
        module, _, item = getattr(self, name).partition(":")
        found = import_module(f"expire_span.{module}")
        return getattr(found, item) if item else found


SUPERVISED = RunKind(
    *(TaskConfig, DecoderConfig, TrainConfig),
    trainer="train.session",
    learner="train.supervised:SupervisedLearner",
    module="models.decoder:Decoder",
    command="cli.supervised",
    comparison="lab.compare.supervised",
    reader="view.source:Reader",
    about="view.source:about_task",
    eval_options=("split", "batches", "batch", "block", "path", "file"),
    cannot={"play": "run {path} is not an agent's: its task is {task.kind}"},
)
AGENT = RunKind(
    *(EnvTask, PolicyConfig, AgentTrainConfig),
    trainer="train.session",
    learner="train.actor_critic:AgentLearner",
    module="models.policy:Policy",
    command="cli.agent",
    comparison="lab.compare.agents",
    reader="view.agent:AgentReader",
    about="view.agent:about_task",
    score="success or return, higher is better",
    eval_options=("episodes", "greedy", "options", "control"),
    called="an agent, which plays episodes",
    place="environment {task.env}",
    model_word="agent, plays the same episodes",
    intro="An agent",
    promise=(
        "An agent with attention normally keeps everything it has seen. This one decides, when it sees something, how many "
        "steps that"
    ),
    piece="observation",
    sequence="episode",
    loss=("Loss of policy and value together.", "loss"),
    valid="in episodes for validation",
    required={"task.env": "an environment; give --task.env, like ExpireSpan/Corridor-Easy-v0"},
    cannot={"read tokens": "run {path} is an agent's, which reads no tokens; expire-span eval {path} plays it"},
)
_TAUGHT = "run {path} taught a Hugging Face model to forget"
RETROFIT = RunKind(
    *(RetrofitTask, BaseModel, DistillConfig),
    trainer="train.distill",
    command="cli.retrofit",
    reader="view.adapter:AdapterReader",
    about="view.source:about_task",
    score="nats from the base model (lower is better)",
    trained_on="",
    cannot={
        "read tokens": f"{_TAUGHT}; use its adapter with: expire-span chat, serve, verify or evaluate-cache",
        "generate": f"{_TAUGHT}; go on from a text with: expire-span generate {{task.model}} --adapter {{path}}/adapter",
        "play": "run {path} is not an agent's: its task is {task.kind}",
        "eval": f"{_TAUGHT}; score it with: expire-span evaluate-cache",
        "look inside": "This run taught a Hugging Face model to forget: expire-span evaluate-cache compares what it keeps.",
    },
)
KINDS = (SUPERVISED, AGENT, RETROFIT)
_BY_TASK = {EnvTask.kind: AGENT, RetrofitTask.kind: RETROFIT}


def kind_of(task: Any) -> RunKind:
    """The kind of a run with this task: its settings, or a table of them as JSON has it."""
    kind = task.get("kind") if isinstance(task, dict) else getattr(task, "kind", None)
    return _BY_TASK.get(kind, SUPERVISED) if isinstance(kind, str) else SUPERVISED


def build_model(settings: Any) -> Any:
    """A new model with these settings: a decoder or a policy."""
    (kind,) = (kind for kind in (SUPERVISED, AGENT) if type(settings) is kind.model)
    return kind.load("module")(settings)
