"""One run of the ordinary training as part of a study: begun, gone on with, or found finished; and how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from expire_span.config import RunConfig
from expire_span.runs import RunFolder
from expire_span.train.supervised import resume, train

LOOK_EVERY = 1.0
"""Seconds between two looks at a run's metrics."""


def finish_run(config: RunConfig, path: Path, recipe: str, cost: float, tick: Callable[[float], None]) -> RunFolder:
    """Train in a run folder of its own, or go on where a killed study left it; `cost` is ticked as the steps go by."""
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
    """Tell the steps that have been written since the last look; the last look is after the end."""
    seen, last = 0, False
    while not last:
        last = ended.wait(LOOK_EVERY)
        lines = RunFolder.open(path).read_metrics() if (path / "config.json").is_file() else []
        step = max((line["step"] for line in lines), default=0)
        if step > seen:
            tick(cost_of_step * (step - seen))
            seen = step
