"""A learner in a run folder: begin a run, or go on with one. The same for every kind of trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from accelerate import Accelerator

from expire_span import checkpoint
from expire_span.config import RunConfig
from expire_span.runs import RunFolder, UserError, check_new

from .devices import describe_environment
from .loop import Learner, TrainingLoop
from .progress import Display
from .trackers import build_tracker


def begin(learner: Learner, config: RunConfig, path: Path, *, recipe: str = "", shown: bool = True) -> RunFolder:
    """Make a new run folder and train the learner in it to the end. The learner is built, so everything has been checked."""
    accelerator = learner.accelerator
    if accelerator.is_main_process:
        check_new(path)
        environment = describe_environment(config, accelerator)
        RunFolder.create(path, config, recipe=recipe, environment=environment)
    accelerator.wait_for_everyone()
    run = RunFolder.open(path)
    with _hold(run, accelerator):
        _build_loop(learner, run, _build_display(learner, run, shown), first=0).run()
    return run


def go_on(build: Callable[[RunConfig], Learner], run: RunFolder, *, shown: bool = True) -> RunFolder:
    """Go on with an interrupted run from its newest sound checkpoint, or from its beginning where there is none."""
    if run.finished:
        raise UserError(f"run {run.path} is finished ({run.config.train.steps} steps); nothing to resume")
    learner = build(run.config)
    accelerator = learner.accelerator
    with _hold(run, accelerator):
        display = _build_display(learner, run, shown)
        snapshot = checkpoint.load(run, rank=accelerator.process_index, warn=display.say)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            checkpoint.remove_unfinished(run)
            checkpoint.remove_damaged(run)
            run.truncate(snapshot.step if snapshot else 0)
        if snapshot is not None:
            learner.load(snapshot)
        accelerator.wait_for_everyone()
        _build_loop(learner, run, display, first=snapshot.step if snapshot else 0).run()
    return run


def _hold(run: RunFolder, accelerator: Accelerator) -> AbstractContextManager[None]:
    """One of the processes that train a run holds its folder for all of them."""
    return run.hold() if accelerator.is_main_process else nullcontext()


def _build_display(learner: Learner, run: RunFolder, shown: bool) -> Display:
    return Display(run.config.train.steps, shown=shown and learner.accelerator.is_main_process)


def _build_loop(learner: Learner, run: RunFolder, display: Display, *, first: int) -> TrainingLoop:
    tracker = build_tracker(run, first, writes=learner.accelerator.is_main_process)
    return TrainingLoop(learner, run, run.config.train, display=display, tracker=tracker, first=first)
