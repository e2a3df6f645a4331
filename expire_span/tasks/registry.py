"""Tasks by the kind of their config: those of the package, and those that a user registers from outside."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from expire_span.task_configs import OUTSIDE_TASKS, TaskConfig

from .contract import Task

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
    kind = config.kind
    if kind in _outside:
        return _outside[kind](config)
    if kind not in TASKS:
        known = ", ".join([*TASKS, *_outside])
        raise ValueError(f"unknown task {kind!r}, known are: {known}; register others with register_task")
    module, name = TASKS[kind]
    return getattr(import_module(f".{module}", __package__), name)(config)


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
