"""One run of the package's supervised training as a cell of a study: it is started, continued or found finished."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from expire_span.runs import RunFolder
from expire_span.settings.run import RunConfig
from expire_span.train.supervised import resume, train

LOOK_EVERY = 1.0
"""Seconds between two readings of a run's metrics."""


def finish_run(config: RunConfig, path: Path, recipe: str, cost: float, tick: Callable[[float], None]) -> RunFolder:
    """Train in a run folder of its own, or continue where an interrupted study stopped.

    cost: cost of the whole run, which is reported to `tick` in parts as steps are done.
    """
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(path, cost / config.train.steps, tick, ended), daemon=True)
    watcher.start()
    try:
        if not (path / "config.json").is_file():
            return train(config, path, recipe=recipe, shown=False)
        run = RunFolder.open(path)
        return run if run.finished else resume(run, shown=False)
    finally:
        ended.set()
        watcher.join()


def _watch(path: Path, cost_of_step: float, tick: Callable[[float], None], ended: threading.Event) -> None:
    """Report the steps that the metrics show since the last reading, until `ended` is set, and once more after it."""
    seen, last = 0, False
    while not last:
        last = ended.wait(LOOK_EVERY)
        lines = RunFolder.open(path).read_metrics() if (path / "config.json").is_file() else []
        step = max((line["step"] for line in lines), default=0)
        if step > seen:
            tick(cost_of_step * (step - seen))
            seen = step
