"""Tasks by the kind of their config: those of the package, and those that a user registers from outside."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from expire_span.errors import UserError
from expire_span.settings.tasks import OUTSIDE_TASKS, TaskConfig

from .contract import Codec, Task

TASKS: dict[str, tuple[str, str]] = {
    "text": ("text", "Text"),
    "recall": ("recall", "Recall"),
    "entrances": ("entrances", "Entrances"),
    "words": ("words", "Words"),
    "books": ("books", "Books"),
    "collision": ("collision", "Collision"),
    "copy": ("copying", "Copy"),
    "corridor": ("twins", "CorridorTwin"),
    "portal": ("twins", "PortalTwin"),
    "instruction": ("twins", "InstructionTwin"),
}
"""Module of this folder and class for each kind; a module is imported when its task is first built."""
_outside: dict[str, Callable[[Any], Task]] = {}


def build_task(config: TaskConfig | Any) -> Task:
    """The task that a config describes."""
    return _find(config.kind)(config)


def _find(kind: str) -> Callable[[Any], Task]:
    if kind in _outside:
        return _outside[kind]
    if kind not in TASKS:
        known = ", ".join([*TASKS, *_outside])
        raise ValueError(f"unknown task {kind!r}, known are: {known}; register others with register_task")
    module, name = TASKS[kind]
    return getattr(import_module(f".{module}", __package__), name)


def build_codec(config: TaskConfig | Any) -> Codec:
    """How the tokens of a task are written. The data need not be there, unless the vocabulary depends on it."""
    builder = _find(config.kind)
    codec_of = getattr(builder, "codec_of", None)
    return builder(config).codec if codec_of is None else codec_of(config)


def text_codec(config: TaskConfig | Any, who: str) -> Codec:
    """The same for a task of text; `who` begins the refusal of others."""
    known = config.kind in TASKS or config.kind in _outside
    codec = build_codec(config) if known else None
    if codec is None or codec.unit == "symbol":
        raise UserError(f"{who} needs a run of text, got a run of task {config.kind}")
    return codec


def register_task(config_class: type, builder: Callable[[Any], Task]) -> None:
    """Make a user's own task known by the `kind` of its config class, a frozen dataclass with a default for `kind`.

    Runs with this config can then be trained, saved and loaded like those of the package.
    """
    kind = getattr(config_class, "kind", None)
    if not isinstance(kind, str):
        raise ValueError(f"{config_class.__name__} must have a field kind with a default string, got {kind!r}")
    if kind in TASKS:
        raise ValueError(f"the kind {kind!r} of {config_class.__name__} is a task of the package; choose another name")
    _outside[kind] = builder
    OUTSIDE_TASKS[kind] = config_class
