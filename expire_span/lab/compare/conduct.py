"""Trains the runs of comparisons: one child process each, several at once or one after the other, with the time left."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from expire_span.runs import RunError
from expire_span.train.progress import show_time

from .children import start_child, stop_child, tell_failure
from .plan import Comparison

POLL = 0.2
"""Seconds between two checks of a child process."""


class Stopped(RunError):
    """The comparison was interrupted; finished runs and checkpoints are kept."""

    exit_code = 130


class ComparisonDisplay:
    """A live line on a terminal, plain lines elsewhere."""

    def __init__(self, total: int) -> None:
        self.bar: Progress | None = None
        if sys.stdout.isatty():
            columns = (BarColumn(bar_width=24), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=Console())
            self.job = self.bar.add_task("starting", total=total)

    def __enter__(self) -> ComparisonDisplay:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)

    def show(self, done: float, text: str) -> None:
        if self.bar is not None:
            self.bar.update(self.job, completed=done, description=text)


@dataclass
class Running:
    """A run whose child process has been started."""

    label: str
    comparison: Comparison
    name: str
    child: subprocess.Popen[bytes]
    said: IO[bytes]
    begun: float

    @property
    def share(self) -> float:
        """Share of its steps that are done."""
        return share_done(self.comparison, self.name)


class Conductor:
    """Starts runs while fewer than `jobs` are in training, and says how each ended.

    runs: each run's comparison and its name there, by the label under which it is told of. describe: gives a finished run's
    result in words. environment: that of the children; None is this process's.
    """

    def __init__(
        self,
        runs: dict[str, tuple[Comparison, str]],
        jobs: int,
        describe: Callable[[Comparison, str], str],
        environment: dict[str, str] | None = None,
    ) -> None:
        self.waiting = [(label, *run) for label, run in runs.items() if not is_finished(*run)]
        self.jobs, self.describe, self.environment = jobs, describe, environment
        self.total = len(self.waiting)
        self.running: list[Running] = []
        self.failed: dict[str, str] = {}
        self.spent: list[float] = []

    @property
    def done(self) -> int:
        return self.total - len(self.waiting) - len(self.running)

    def run(self) -> dict[str, str]:
        """Train every run that is not finished; returns the reasons of failed ones, by label."""
        with ComparisonDisplay(self.total) as display:
            try:
                while self.waiting or self.running:
                    self._start()
                    self._wait()
                    for ended in [run for run in self.running if run.child.poll() is not None]:
                        self.running.remove(ended)
                        display.say(self._end(ended))
                    if display.bar is not None:
                        self._show(display)
            except BaseException as error:
                self._stop()
                if not isinstance(error, KeyboardInterrupt):
                    raise
                advice = "the same command goes on from here"
                raise Stopped(f"stopped with {self.done} of {self.total} runs finished; {advice}") from error
        return self.failed

    def _start(self) -> None:
        while self.waiting and len(self.running) < self.jobs:
            label, comparison, name = self.waiting.pop(0)
            said = tempfile.TemporaryFile()  # noqa: SIM115 (closed where the run ends)
            child = start_child(comparison.path, name, said, self.environment)
            self.running.append(Running(label, comparison, name, child, said, time.monotonic()))

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.running[0].child.wait(POLL)

    def _show(self, display: ComparisonDisplay) -> None:
        """The live line: how many runs are finished, what is in training, and the time left."""
        shares = [run.share for run in self.running]
        paces = [(time.monotonic() - run.begun) / share for run, share in zip(self.running, shares) if share > 0.02]
        left = self.left(sum(shares), paces)
        what = f"{self.running[0].label} {shares[0]:.0%}" if len(shares) == 1 else f"{len(shares)} in training"
        rest = "" if left is None else f"  left {show_time(left)}"
        display.show(self.done + sum(shares), f"{self.done}/{self.total} {what}{rest}")

    def left(self, begun: float = 0.0, paces: list[float] | None = None) -> float | None:
        """Estimated seconds until the end, None while nothing is known of the speed.

        begun: runs' worth of work that the runs in training have done. paces: seconds that a whole run will take, for each of
        them of which it can be told.
        """
        known = [*self.spent, *(paces or [])]
        return (self.total - self.done - begun) * statistics.fmean(known) / self.jobs if known else None

    def _end(self, run: Running) -> str:
        """What to say of a run that has ended."""
        with run.said:
            reason = tell_failure(run.child, run.said, run.comparison.path / f"{run.name}.error.txt")
        spent, place = time.monotonic() - run.begun, f"{self.done}/{self.total} {run.label}"
        if reason is not None:
            self.failed[run.label] = reason
            return f"{place} failed: {reason}"
        self.spent.append(spent)
        rest = f", left about {show_time(self.left() or 0)}" if self.done < self.total else ""
        return f"{place}: {self.describe(run.comparison, run.name)}, {show_time(spent)}{rest}"

    def _stop(self) -> None:
        """Ask all children to save and end, at once, then wait for them."""
        for run in self.running:
            assert run.child.stdin is not None
            with contextlib.suppress(OSError):
                run.child.stdin.close()
        for run in self.running:
            stop_child(run.child)
            run.said.close()


def conduct(comparison: Comparison, describe: Callable[[str], str]) -> dict[str, str]:
    """Train every run of a comparison that is not finished, one after the other, so that their times can be compared; returns
    the reasons of failed runs, by name."""
    return Conductor({name: (comparison, name) for name in comparison.runs}, 1, lambda _, name: describe(name)).run()


def is_finished(comparison: Comparison, name: str) -> bool:
    run = comparison.run_of(name)
    return run is not None and run.finished


def share_done(comparison: Comparison, name: str) -> float:
    """Share of a run's steps that are done, according to its last line of metrics."""
    path = comparison.path / name
    if not (path / "config.json").exists():
        return 0.0
    run = comparison.run_of(name)
    lines = run.read_speed() if run is not None else []
    return lines[-1]["step"] / run.config.train.steps if run is not None and lines else 0.0
