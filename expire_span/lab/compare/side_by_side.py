"""Runs of a suite side by side: one child process each, with one thread, as many at once as the computer has cores."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from expire_span.train.progress import show_time

from .conduct import POLL, ComparisonDisplay, Stopped, is_finished, share_done, start_child, stop_child, tell_failure
from .plan import Comparison
from .suite import Suite


@dataclass
class Running:
    """A run whose child process has been started."""

    comparison: Comparison
    name: str
    child: subprocess.Popen[bytes]
    said: IO[bytes]
    begun: float

    @property
    def label(self) -> str:
        return f"{self.comparison.path.name}/{self.name}"


class SideBySide:
    """Starts runs while fewer than `jobs` are in training, and says how each ended."""

    def __init__(self, suite: Suite, jobs: int, describe: Callable[[Comparison, str], str]) -> None:
        self.waiting = [run for run in suite.list_runs() if not is_finished(*run)]
        self.jobs, self.describe, self.total = jobs, describe, len(self.waiting)
        self.running: list[Running] = []
        self.failed: dict[str, str] = {}
        self.spent: list[float] = []

    @property
    def done(self) -> int:
        return self.total - len(self.waiting) - len(self.running)

    def run(self) -> dict[str, str]:
        """Train every run that is not finished; returns the reasons of failed ones, by name."""
        with ComparisonDisplay(self.total) as display:
            try:
                while self.waiting or self.running:
                    self._start()
                    self._wait()
                    for ended in [run for run in self.running if run.child.poll() is not None]:
                        self.running.remove(ended)
                        display.say(self._end(ended))
                    if display.bar is not None:
                        shares = sum(share_done(run.comparison, run.name) for run in self.running)
                        display.show(self.done + shares, f"{self.done}/{self.total}, {len(self.running)} in training")
            except BaseException as error:
                self._stop()
                if not isinstance(error, KeyboardInterrupt):
                    raise
                advice = "the same command goes on from here"
                raise Stopped(f"stopped with {self.done} of {self.total} runs finished; {advice}") from error
        return self.failed

    def _start(self) -> None:
        alone = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        while self.waiting and len(self.running) < self.jobs:
            comparison, name = self.waiting.pop(0)
            said = tempfile.TemporaryFile()  # noqa: SIM115 (closed where the run ends)
            child = start_child(comparison.path, name, said, alone)
            self.running.append(Running(comparison, name, child, said, time.monotonic()))

    def _wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.running[0].child.wait(POLL)

    def _end(self, run: Running) -> str:
        """What to say of a run that has ended."""
        with run.said:
            reason = tell_failure(run.child, run.said, run.comparison.path / f"{run.name}.error.txt")
        spent, place = time.monotonic() - run.begun, f"{self.done}/{self.total} {run.label}"
        if reason is not None:
            self.failed[run.label] = reason
            return f"{place} failed: {reason}"
        self.spent.append(spent)
        left = (self.total - self.done) * sum(self.spent) / len(self.spent) / self.jobs
        rest = f", left about {show_time(left)}" if self.done < self.total else ""
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
