"""The registry of memory systems. Each is declared in a folder of its own; nothing here imports torch.

A system outside this package is added by `register(MemorySystem(settings=..., layer="my_package.layers:Mine", ...))`. It can
then be trained, compared, and tested with the shared test matrix like those that are built in.
"""

from __future__ import annotations

import importlib
import os
import re
from typing import Any, Union

from expire_span.checks import require, show

from .adaptive_span import SYSTEM as _ADAPTIVE_SPAN
from .bigbird import SYSTEM as _BIGBIRD
from .compressive import SYSTEM as _COMPRESSIVE
from .contract import AttentionShape, Budget, LayerShape, MemorySystem, Recipe, StateSize
from .expire_span import SYSTEM as _EXPIRE_SPAN
from .forgetting import SYSTEM as _FORGETTING
from .full import SYSTEM as _FULL
from .gated_deltanet import SYSTEM as _GATED_DELTANET
from .linear import SYSTEM as _LINEAR
from .longformer import SYSTEM as _LONGFORMER
from .performer import SYSTEM as _PERFORMER
from .recurrent import SYSTEMS as _RECURRENT
from .reformer import SYSTEM as _REFORMER
from .routing import SYSTEM as _ROUTING
from .sliding_window import SYSTEM as _SLIDING_WINDOW
from .streaming_sinks import SYSTEM as _STREAMING_SINKS
from .transformer_xl import SYSTEM as _TRANSFORMER_XL

__all__ = [
    "PLUGINS",
    "SYSTEMS",
    "AttentionShape",
    "Budget",
    "LayerShape",
    "MemorySystem",
    "Recipe",
    "StateSize",
    "find",
    "mixer_config",
    "register",
    "split_hybrid",
]

PLUGINS = "EXPIRE_SPAN_PLUGINS"
"""Environment variable that names modules, separated by commas, which register memory systems or tasks when imported."""

SYSTEMS: dict[str, MemorySystem] = {}
"""Every memory system by kind."""

MixerConfig: Any = None
"""The type "settings of any memory system": the union of all registered classes, used to parse command lines and JSON."""


def register(system: MemorySystem) -> MemorySystem:
    """Add a memory system. Its settings are a frozen dataclass with a literal `kind` that no other system has."""
    global MixerConfig
    wanted = isinstance(system, MemorySystem)
    require(wanted, f"register takes a MemorySystem, got {show(system)}; its settings and its layer are fields of one")
    known = SYSTEMS.get(system.kind)
    taken = known is not None and known.layer != system.layer
    require(not taken, f"a memory system of kind {system.kind!r} is registered already; choose another kind")
    SYSTEMS[system.kind] = system
    MixerConfig = Union[tuple(s.settings for s in SYSTEMS.values())]  # noqa: UP007 (built at run time)
    return system


def find(kind: str) -> MemorySystem:
    """The system with this kind; for an unknown kind, ValueError lists those that exist."""
    require(kind in SYSTEMS, f"unknown mixer {kind!r}, known are: {', '.join(SYSTEMS)}")
    return SYSTEMS[kind]


def mixer_config(kind: str, **fields: Any) -> Any:
    """The settings of the memory system of this kind, with its defaults for the fields that are not given."""
    return find(kind).settings(**fields)


def split_hybrid(name: str) -> list[tuple[int, str]]:
    """The parts of a name of --mixers, as (number of layers, kind): 3xa+b is [(3, a), (1, b)], and a is [(1, a)]."""
    parts = [re.fullmatch(r"(?:(\d{1,6})x)?(.*)", part, re.DOTALL) for part in name.split("+")]
    return [(int(part[1] or 1), part[2]) for part in parts if part is not None]


def parts_of_mixer(name: str) -> list[tuple[int, str]]:
    """The same, of a name that has been checked: one system, or a hybrid of two."""
    parts = split_hybrid(name)
    for count, part in parts:
        find(part)
        require(count >= 1, f"a hybrid has at least one layer of each system, got {count} of {part} in {name}")
    one = len(parts) == 1 and parts[0] == (1, name)
    require(one or len(parts) == 2, f"a hybrid is of two systems, like 3xgated_deltanet+expire_span, got {name}")
    return parts


def load_plugins() -> None:
    """Import the modules that the environment variable `EXPIRE_SPAN_PLUGINS` names, so that they can register systems."""
    for name in filter(None, os.environ.get(PLUGINS, "").split(",")):
        try:
            importlib.import_module(name.strip())
        except ImportError as error:
            advice = "its folder must be in PYTHONPATH"
            raise ValueError(
                f"{PLUGINS} names the module {name!r}, which cannot be imported: {error}; {advice}"
            ) from error


for _system in (
    _EXPIRE_SPAN,
    _FULL,
    _TRANSFORMER_XL,
    _ADAPTIVE_SPAN,
    _COMPRESSIVE,
    _SLIDING_WINDOW,
    _LONGFORMER,
    _BIGBIRD,
    _LINEAR,
    _PERFORMER,
    _ROUTING,
    _REFORMER,
    *_RECURRENT,
    _FORGETTING,
    _GATED_DELTANET,
    _STREAMING_SINKS,
):
    register(_system)
