"""Frozen dataclasses that describe a run. Standard library only, so that `--help` needs no torch.

A run is a `RunConfig`: a task (task_configs.py), a model (model_configs.py), how to train it (train_configs.py). Every field
is documented under it; the same words are the command line's help. `to_dict` and `from_dict` turn any config into JSON and
back.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass
from typing import Any

from expire_span.mixer_configs import MixerConfig
from expire_span.model_configs import BackboneConfig, DecoderConfig
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.task_configs import OUTSIDE_TASKS, EntrancesTask, RecallTask, TaskConfig, TextTask, WordsTask
from expire_span.train_configs import BudgetConfig, TrainConfig

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

FORMAT_VERSION = 1
"""Version of the run folder's layout and of config.json."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run: what is learned, by which model, how."""

    task: TaskConfig
    """The data and the score."""
    model: DecoderConfig
    """The decoder."""
    train: TrainConfig
    """The training."""
    seed: int = 0
    """Seed of weights, data order and noise."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(cls: Any, data: dict[str, Any]) -> Any:
    """The inverse of `to_dict`; unknown fields are refused with the nearest known name."""
    data = cls.upgrade(data) if hasattr(cls, "upgrade") else data  # settings as older run folders hold them
    hints = typing.get_type_hints(cls)
    for name in data:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{cls.__name__} has no field {name}{advice}")
    return cls(**{name: _parse(hints[name], value) for name, value in data.items()})


def _parse(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return from_dict(_pick_class(hint, value), value)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return value


def _pick_class(hint: Any, value: dict[str, Any]) -> Any:
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    members = typing.get_args(hint) if union else (hint,)
    members = tuple(m for m in members if dataclasses.is_dataclass(m))
    kinds = {getattr(m, "kind", None): m for m in members}
    kinds |= OUTSIDE_TASKS if hint == TaskConfig else {}
    if len(members) == 1 and "kind" not in value:
        return members[0]
    if value.get("kind") not in kinds:
        known = ", ".join(sorted(str(k) for k in kinds))
        raise ValueError(f"unknown kind {value.get('kind')!r}, known are: {known}")
    return kinds[value["kind"]]
