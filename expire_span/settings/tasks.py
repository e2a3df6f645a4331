"""Settings of tasks, each with a literal `kind`. Standard library only."""

from __future__ import annotations

from .gridworld_tasks import CorridorTask, InstructionTask, PortalTask, TMazeTask
from .sequence_tasks import CollisionTask, CopyTask, EntrancesTask, RecallTask
from .text_tasks import BooksTask, TextTask, WordsTask

__all__ = [
    "OUTSIDE_TASKS",
    "BooksTask",
    "CollisionTask",
    "CopyTask",
    "CorridorTask",
    "EntrancesTask",
    "InstructionTask",
    "PortalTask",
    "RecallTask",
    "TMazeTask",
    "TaskConfig",
    "TextTask",
    "WordsTask",
]

TaskConfig = (
    TextTask
    | RecallTask
    | EntrancesTask
    | WordsTask
    | CopyTask
    | CollisionTask
    | BooksTask
    | CorridorTask
    | PortalTask
    | InstructionTask
)
"""Any task's config; each has a literal `kind`."""
OUTSIDE_TASKS: dict[str, type] = {}
"""Config classes that users registered from outside the package, by kind (see expire_span.tasks.registry)."""
