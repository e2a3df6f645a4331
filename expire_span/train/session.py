"""Training a learner in a run folder: begin a run, or continue one. All kinds of trainers use it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from expire_span import checkpoint
from expire_span.checkpoint import Snapshot
from expire_span.errors import StorageError
from expire_span.runs import RunFolder, UserError, check_new, copy_tokenizer
from expire_span.settings.run import RunConfig

from .data_fingerprint import check_fingerprint
from .devices import describe_environment
from .loop import Learner, TrainingLoop
from .progress import Display
from .trackers import build_tracker


@dataclass(frozen=True)
class Origin:
    """Weights from which a run starts, in place of random ones."""

    weights: dict[str, Tensor]
    about: dict[str, Any]
    """Where they come from, for config.json."""

    @classmethod
    def of(cls, run: RunFolder, model: Any) -> Origin:
        """The best weights in a run's newest intact checkpoint; weights that do not fit the model are refused."""
        snapshot = checkpoint.load(run)
        if snapshot is None:
            raise UserError(f"run {run.path} has no checkpoint yet, so nothing can start from it; train it first")
        checkpoint.check_weights(snapshot.best_weights, model.state_dict(), f"run {run.path}")
        _check_alike(run, model.config)
        return cls(snapshot.best_weights, {"run": str(run.path), "step": snapshot.step})


ALIKE = ("heads", "norm", "norm_kind", "activation", "positions", "qk_norm")
"""Settings that give weights another meaning without changing their shapes."""


def _check_alike(run: RunFolder, model: Any) -> None:
    """Refuse weights that would compute something else in this model than in the one that learned them."""
    for name in ALIKE:
        theirs, ours = getattr(run.config.model, name, None), getattr(model, name, None)
        if theirs != ours:
            raise UserError(
                f"run {run.path} was trained with model.{name} {theirs}, and this model has {ours}; its weights would mean "
                f"something else, so give --model.{name.replace('_', '-')} {theirs}"
            )


def train(
    config: RunConfig,
    path: Path | str,
    *,
    recipe: str = "",
    init_from: RunFolder | None = None,
    shown: bool = True,
    **given: Any,
) -> RunFolder:
    """Start a new run in folder `path` and train it to the end. Nothing is written before everything is checked.

    init_from: a run whose weights the new one starts from, of an agent its best; None starts from random weights. given: what
    the learner takes beside its settings, such as a task that they do not name.
    """
    learner = config.kind.load("learner")(config, **given)
    origin = Origin.of(init_from, learner.trained) if init_from is not None else None
    return begin(learner, learner.config, path, recipe=recipe, origin=origin, shown=shown)


def resume(
    run: RunFolder,
    *,
    allow_changed_data: bool = False,
    context_parallel: int | None = None,
    shown: bool = True,
    **given: Any,
) -> RunFolder:
    """Continue an interrupted run from its newest intact checkpoint.

    context_parallel: number of processes that share each row from now on; None leaves it as the run was begun.
    """
    build = partial(_build_sharing, context_parallel=context_parallel, **given)
    return go_on(build, run, allow_changed_data=allow_changed_data, shown=shown)


def _build_sharing(config: RunConfig, *, context_parallel: int | None, **given: Any) -> Learner:
    """A run's learner, where the number of processes that share each row may have changed."""
    if context_parallel is not None:
        config = replace(config, train=replace(config.train, context_parallel=context_parallel))
    return config.kind.load("learner")(config, **given)


def begin(
    learner: Learner,
    config: RunConfig,
    path: Path | str,
    *,
    recipe: str = "",
    origin: Origin | None = None,
    shown: bool = True,
) -> RunFolder:
    """Make a new run folder and train the learner in it to the end. Building the learner has checked all settings."""
    accelerator, path = learner.accelerator, Path(path)
    if accelerator.is_main_process:
        make_folder(learner, config, path, recipe=recipe, origin=origin)
    accelerator.wait_for_everyone()
    run = RunFolder.open(path)
    with _lock_run(run, accelerator):
        if origin is not None:
            learner.load(Snapshot.of_weights(origin.weights))
        display = _build_display(learner, run, shown)
        for note in getattr(learner, "notes", ()):
            display.say(note)
        _build_loop(learner, run, display, first=0).run()
    return run


def make_folder(
    learner: Learner, config: RunConfig, path: Path, *, recipe: str, origin: Origin | None = None
) -> RunFolder:
    """Make the folder of a run that has not been trained yet; the weights of `origin` become its checkpoint of step 0."""
    check_new(path)

    def fill(folder: Path) -> None:
        copy_tokenizer(config, folder)
        if origin is not None:
            checkpoint.write_weights(folder, origin.weights)

    return RunFolder.create(
        path,
        config,
        recipe=recipe,
        environment=describe_environment(learner.accelerator, learner.impl),
        data=learner.fingerprint(),
        origin=origin.about if origin is not None else None,
        fill=fill,
    )


def go_on(
    build: Callable[[RunConfig], Learner], run: RunFolder, *, allow_changed_data: bool = False, shown: bool = True
) -> RunFolder:
    """Continue an interrupted run from its newest intact checkpoint, or from the beginning if there is none."""
    if run.finished:
        raise UserError(f"run {run.path} is finished ({run.config.train.steps} steps); nothing to resume")
    run.check_own_checkpoints()
    learner = build(run.config)
    accelerator = learner.accelerator
    if run.data and accelerator.is_main_process and not allow_changed_data:
        check_fingerprint(run, learner.fingerprint())
    with _lock_run(run, accelerator):
        display = _build_display(learner, run, shown)
        snapshot = checkpoint.load(run, rank=accelerator.process_index, warn=display.say)
        if snapshot is not None:
            _load(learner, snapshot, run)
        else:
            display.say("this run has no checkpoint yet, so it starts from its first step")
        accelerator.wait_for_everyone()
        first = snapshot.step if snapshot else 0
        if accelerator.is_main_process:  # nothing is deleted before all that the run needs has been read
            run.truncate(first)
            run.remove_leftovers()
            checkpoint.remove_damaged(run)
            checkpoint.prune(run, run.config.train.keep_checkpoints)
        accelerator.wait_for_everyone()
        _build_loop(learner, run, display, first=first).run()
    return run


def _load(learner: Learner, snapshot: Snapshot, run: RunFolder) -> None:
    """Load a checkpoint into a learner; if it is intact but does not fit the learner, StorageError says so."""
    try:
        learner.load(snapshot)
    except (KeyError, TypeError, RuntimeError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StorageError(
            f"the checkpoint of step {snapshot.step} of run {run.path} does not fit the run's config ({cause}); "
            f"move it away from {run.checkpoints}"
        ) from error


def _lock_run(run: RunFolder, accelerator: Accelerator) -> AbstractContextManager[None]:
    """Lock the run folder, in the first process for all that train this run."""
    return run.lock() if accelerator.is_main_process else nullcontext()


def _build_display(learner: Learner, run: RunFolder, shown: bool) -> Display:
    return Display(run.config.train.steps, shown=shown and learner.accelerator.is_main_process)


def _build_loop(learner: Learner, run: RunFolder, display: Display, *, first: int) -> TrainingLoop:
    tracker = build_tracker(run, first, writes=learner.accelerator.is_main_process)
    return TrainingLoop(learner, run, run.config.train, display=display, tracker=tracker, first=first)
