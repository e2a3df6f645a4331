"""Frozen dataclasses that describe a run. Standard library only, so that `--help` needs no torch.

A run is a `RunConfig`: a task, a model, and how to train it; tasks.py, models.py and train.py have those of supervised runs,
agent.py and retrofit.py those of the other kinds (kinds.py). The string under each field documents it and is also the command
line's help. `to_dict` and `from_dict` convert any config to JSON values
and back; `from_dict` checks every field, because a file may be damaged or come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from expire_span.checks import Seed, check_fields, describe, fits, members_of, require, show
from expire_span.field_docs import documented
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.settings.agent import AgentTrainConfig, EnvTask, PolicyConfig
from expire_span.settings.kinds import RunKind, kind_of
from expire_span.settings.models import BackboneConfig, DecoderConfig
from expire_span.settings.retrofit import BaseModel, DistillConfig, RetrofitTask
from expire_span.settings.tasks import OUTSIDE_TASKS, EntrancesTask, RecallTask, TaskConfig, TextTask, WordsTask
from expire_span.settings.train import BudgetConfig, TrainConfig

__all__ = [
    "FORMAT_VERSION",
    "BackboneConfig",
    "BudgetConfig",
    "DecoderConfig",
    "EntrancesTask",
    "ExpireSpanConfig",
    "MixerConfig",
    "RecallTask",
    "RunConfig",
    "TaskConfig",
    "TextTask",
    "TrainConfig",
    "WordsTask",
    "from_dict",
    "to_dict",
]

MixerConfig = Any
"""The settings of any memory system; each class has a literal `kind`. The systems are registered in models/systems."""
FORMAT_VERSION = 2
"""Version of the run folder's layout and of config.json."""


LARGEST = 2**48
"""Sizes must be smaller than this, since larger ones overflow the arithmetic of libraries."""

MOST_LAYERS = 10_000
"""Largest number of layers; larger values are mistakes, and checking them layer by layer would take long."""


Task = TypeVar("Task", bound="TaskConfig | EnvTask | RetrofitTask")
Model = TypeVar("Model", bound="DecoderConfig | PolicyConfig | BaseModel")
Learning = TypeVar("Learning", bound="TrainConfig | AgentTrainConfig | DistillConfig")


@documented
@dataclass(frozen=True)
class RunConfig(Generic[Task, Model, Learning]):
    """A whole run: the task, the model, and the training. The task decides of which kind the run is."""

    task: Task
    """The data and the score, or an agent's environment."""
    model: Model
    """The decoder, an agent's policy, or what a retrofit's base model is."""
    train: Learning
    """The training."""
    seed: Seed = 0
    """Seed of weights, data order and noise."""

    @property
    def kind(self) -> RunKind:
        """What differs between kinds of run."""
        return kind_of(self.task)

    def typed(self, command: Any) -> Any:
        """A command's generic class of options, for settings of this run's kind."""
        settings: Any = RunConfig
        return command[settings[tuple(self.kind.hints.values())]]

    def __post_init__(self) -> None:
        check_fields(self, **self.kind.hints)
        layers = self.model.layers
        require(layers <= MOST_LAYERS, f"model.layers must be at most {MOST_LAYERS:,}, got {layers:,}")
        for name, value in walk(self):
            sane = not isinstance(value, int) or abs(value) < LARGEST or name == "seed"
            require(sane, f"{name} must be smaller than {LARGEST:,}, got {value:,}" if not sane else "")
            finite = not isinstance(value, float) or math.isfinite(value)
            require(finite, f"{name} must be a finite number, got {value}")


SupervisedRunConfig = RunConfig[TaskConfig, DecoderConfig, TrainConfig]
AgentRunConfig = RunConfig[EnvTask, PolicyConfig, AgentTrainConfig]
RetrofitRunConfig = RunConfig[RetrofitTask, BaseModel, DistillConfig]


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a config and of the configs inside it, with its dotted name."""
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value):
            yield from walk(value, f"{name}.")
        else:
            yield name, value


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(cls: Any, data: Any, where: str = "") -> Any:
    """The inverse of `to_dict`. Unknown and missing fields, wrong types and unknown words are refused, naming the field."""
    name = where or cls.__name__
    require(isinstance(data, dict), f"{name} must be a table of fields, got {show(data)}")
    hints = typing.get_type_hints(cls)  # not cached, since systems and tasks may be registered from outside at any time
    hints |= kind_of(data.get("task")).hints if cls is RunConfig else {}
    for field in data:
        if field not in hints:
            near = difflib.get_close_matches(str(field), hints, n=1)
            raise ValueError(f"{name} has no field {field}{f'; did you mean {near[0]}?' if near else ''}")
    for field in dataclasses.fields(cls):
        given = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        require(given or field.name in data, f"{name} lacks the field {field.name}")
    prefix = f"{where}." if where else ""
    return cls(**{field: _parse(hints[field], value, f"{prefix}{field}") for field, value in data.items()})


def _parse(hint: Any, value: Any, where: str) -> Any:
    """One value converted to its field's type; lists from JSON become tuples."""
    members = members_of(hint)
    if value is None and type(None) in members:
        return None
    if any(dataclasses.is_dataclass(member) for member in members):
        return from_dict(_pick_class(hint, value, where), value, where)
    members = [member for member in members if member is not type(None)]
    for member in members:
        if fits(member, value):
            return _convert(member, value, where)
    raise ValueError(f"{where} must be {' or '.join(describe(m) for m in members)}, got {show(value)}")


def _convert(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) not in (tuple, list):
        return value
    kinds = typing.get_args(hint)
    endless = len(kinds) == 1 or kinds[-1] is Ellipsis
    require(endless or len(kinds) == len(value), f"{where} must have {len(kinds)} values, got {len(value)}")
    parts = [_parse(kinds[0] if endless else kinds[n], x, f"{where}[{n}]") for n, x in enumerate(value)]
    return tuple(parts) if typing.get_origin(hint) is tuple else parts


def _pick_class(hint: Any, value: Any, where: str) -> Any:
    require(isinstance(value, dict), f"{where} must be a table of fields, got {show(value)}")
    members = members_of(hint)
    members = tuple(m for m in members if dataclasses.is_dataclass(m))
    kinds = {getattr(m, "kind", None): m for m in members}
    kinds |= OUTSIDE_TASKS if hint == TaskConfig else {}
    if len(members) == 1 and "kind" not in value:
        return members[0]
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        known = ", ".join(sorted(str(k) for k in kinds))
        outside = "one of your own is known once EXPIRE_SPAN_PLUGINS names its module"
        raise ValueError(f"unknown kind {kind!r} of {where}, known are: {known}; {outside}")
    return kinds[kind]
