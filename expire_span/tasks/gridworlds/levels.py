"""The grid worlds by name and difficulty."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask, TMazeTask

from .arrays import Backend
from .corridor import Corridor
from .engine import WorldEngine
from .instruction import Instruction
from .portal import Portal
from .tmaze import TMaze

WORLDS: dict[str, type[WorldEngine]] = {
    "corridor": Corridor,
    "portal": Portal,
    "instruction": Instruction,
    "tmaze": TMaze,
}

_HARD_CORRIDOR = CorridorTask(max_length=200, colours=4, niche_prob=0.5, shuffled=True)
LEVELS: dict[str, dict[str, Any]] = {
    "Corridor": {"Easy": CorridorTask(max_length=20), "Medium": CorridorTask(), "Hard": _HARD_CORRIDOR},
    "CorridorPassive": {
        "Easy": CorridorTask(max_length=20, passive=True),
        "Medium": CorridorTask(passive=True),
        "Hard": replace(_HARD_CORRIDOR, passive=True),
    },
    "Portal": {
        "Easy": PortalTask(rooms=4, max_steps=150),
        "Medium": PortalTask(),
        "Hard": PortalTask(rooms=12, width=7, marked=False, max_steps=900, view=7),
    },
    "Instruction": {
        "Easy": InstructionTask(instructions=1, talk=50),
        "Medium": InstructionTask(instructions=3, talk=200),
        "Hard": InstructionTask(instructions=6, talk=1000),
    },
    "EndlessTMaze": {
        "Easy": TMazeTask(min_length=3, max_length=8),
        "Medium": TMazeTask(),
        "Hard": TMazeTask(min_length=50, max_length=100),
    },
}
"""Settings of every registered environment, by name and difficulty."""


def build_engine(config: Any, num_envs: int, *, backend: Backend = "numpy", device: str = "cpu") -> WorldEngine:
    """The engine that a grid world's config describes."""
    if config.kind not in WORLDS:
        raise ValueError(f"unknown grid world {config.kind!r}, known are: {', '.join(WORLDS)}")
    return WORLDS[config.kind](config, num_envs, backend=backend, device=device)


def level_config(name: str, level: str, **changes: Any) -> Any:
    """Settings of a world at a difficulty, with some fields changed."""
    if name not in LEVELS:
        raise ValueError(f"unknown grid world {name!r}, known are: {', '.join(LEVELS)}")
    if level not in LEVELS[name]:
        raise ValueError(f"unknown difficulty {level!r} of {name}, known are: {', '.join(LEVELS[name])}")
    return replace(LEVELS[name][level], **changes)
