"""Recipes with several stages: each stage is a run of its own, which starts from the weights of the one before.

The last one has the name that was asked for, and those before it NAME-stage1, NAME-stage2, and so on. The same command again
goes on where it was interrupted: finished stages are left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expire_span.recipes import stages_of, summary
from expire_span.runs import RunFolder, UserError, check_name, check_new, find_run

from .parsing import is_first_process


@dataclass(frozen=True)
class Stage:
    """One stage that is to be trained."""

    command: Any
    """The options of `train`, `runs.Train` or `agent.TrainAgent`, with the settings of this stage."""
    path: Path
    begun: RunFolder | None
    """The run, if it has begun already."""
    title: str


def plan_stages(recipe: str, commands: Sequence[Any]) -> list[Stage]:
    """The stages to train: one for each command; those that are in the runs folder must have the same settings."""
    last, count = commands[-1], len(commands)
    name = last.name or recipe
    check_name(name)
    if last.stage is not None and not 1 <= last.stage <= count:
        raise UserError(f"--stage must lie between 1 and {count}, the number of stages of {recipe}, got {last.stage}")
    stages = []
    for n, (command, make) in enumerate(zip(commands, stages_of(recipe)), 1):
        path = command.runs_dir / (name if n == count else f"{name}-stage{n}")
        title = f"stage {n} of {count}, {path.name}: {summary(make)}" if count > 1 else ""
        if last.stage in (None, n):
            stages.append(Stage(command, path, _find_begun(path, command.config, n < count), title))
    return stages


def _find_begun(path: Path, config: Any, may_exist: bool) -> RunFolder | None:
    """The run of an earlier stage that has begun, None if it has not; the folder of the last stage must be new."""
    if may_exist and path.exists():
        run = find_run(str(path), path.parent)
        for part in ("task", "train", "seed"):
            if getattr(run.config, part) != getattr(config, part):
                raise UserError(f"{path} was trained with another {part}; give another --name, or move it away")
        return run
    if is_first_process():
        check_new(path)
    return None


def train_stages(recipe: str, stages: Sequence[Stage], train: Callable[..., RunFolder], resume: Any) -> list[RunFolder]:
    """Train the stages that are not finished, in turn; the first starts from --init-from, if that is given."""
    first, runs = stages[0].command, []
    before = find_run(first.init_from, first.runs_dir) if first.init_from is not None else None
    for stage in stages:
        if stage.title and is_first_process():
            print(stage.title + (" (trained already)" if stage.begun is not None and stage.begun.finished else ""))
        if stage.begun is None:
            before = train(stage.command.config, stage.path, recipe=recipe, init_from=before)
        else:
            before = stage.begun if stage.begun.finished else resume(stage.begun)
        runs.append(before)
    return runs
