"""Trains and evaluates one system of a comparison: `python -m expire_span.lab.compare.worker FOLDER RUN`.

Each system has a process of its own, so that its peak memory can be measured. The process ends with its parent: standard input
is a pipe that the parent keeps open, and when it closes, training is asked to stop, which saves a checkpoint.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from expire_span.errors import explain
from expire_span.models.systems import load_plugins
from expire_span.settings.run import RunConfig
from expire_span.train import session
from expire_span.train.loop import Learner
from expire_span.train.memory_peak import forget_peak

from .plan import Comparison

WARM_STEPS = 5
"""Least number of warm-up steps before timing, for compilation, tuning and the memory allocator."""
WARM_SHARE, TIMED_SHARE = 0.01, 0.03
"""Shares of the training time: the least time of warm-up, and the time over which steps are timed."""
TIMED_STEPS = 16
"""Least number of steps that are timed."""


def run_system(folder: Path, name: str) -> None:
    """Start the run, or continue it, and train it to its end."""
    comparison = Comparison.open(folder)
    run = comparison.run_of(name)
    if run is None:
        config = comparison.runs[name][1]
        if comparison.train_seconds is not None:
            config = with_steps_for(config, comparison.train_seconds)
        session.train(config, folder / name, recipe=comparison.recipe, shown=False)
    elif not run.finished:
        session.resume(run, shown=False)


def with_steps_for(config: RunConfig, seconds: float) -> RunConfig:
    """The run with as many steps as fit into `seconds` at its measured speed, so that the schedule fits the time."""
    learner = config.kind.load("learner")(config)
    first = _step_for(learner, WARM_SHARE * seconds, WARM_STEPS)[0]
    pace = _step_for(learner, TIMED_SHARE * seconds, TIMED_STEPS, first)[1]
    del learner
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    forget_peak()
    return replace(config, train=replace(config.train, steps=max(1, round(seconds / pace))))


def _step_for(learner: Learner, seconds: float, least: int, first: int = 0) -> tuple[int, float]:
    """Train for at least `seconds` and `least` steps; returns the total number of steps, and the seconds per step.

    Metrics are read, for which the host waits for the device, only as often as in training.
    """
    _wait()
    start, step = time.perf_counter(), first
    while step - first < least or time.perf_counter() - start < seconds:
        learner.step(step)
        step += 1
        if (step - first) % least == 0:
            learner.metrics()
            _wait()
    _wait()
    return step, (time.perf_counter() - start) / (step - first)


def _wait() -> None:
    """Wait until a GPU has finished all work that was launched."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def end_with_parent() -> None:
    """Ask this process to stop once the parent, who holds the other end of standard input, is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def main(args: list[str]) -> int:
    end_with_parent()
    try:
        load_plugins()
        run_system(Path(args[0]), args[1])
    except Exception as error:
        told = explain(error)
        if told is None:  # a bug of this package; the parent process shows the last line of its traceback
            raise
        print(" ".join(told[0].split()), file=sys.stderr)
        return told[1]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
