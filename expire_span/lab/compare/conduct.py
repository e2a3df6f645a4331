"""Runs a comparison: one child process per system, one after the other, with progress and time left."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from expire_span.disk.files import write_atomic
from expire_span.runs import RunError
from expire_span.train.progress import show_time

from .plan import Comparison

POLL = 0.2
"""Seconds between two checks of a child process."""
PATIENCE = 60.0
"""Seconds that a child gets to save its work when the comparison is stopped."""


START = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
place = sys.argv[1]
spec = spec_from_file_location("expire_span", place + "/__init__.py", submodule_search_locations=[place])
sys.modules["expire_span"] = package = module_from_spec(spec)
spec.loader.exec_module(package)
from expire_span.lab.compare.worker import main
sys.exit(main(sys.argv[2:]))
"""
"""The program of a child process, run with -P: the current folder is not searched for modules, so that a file in it with the
name of a library is never run; and the package is loaded from the same folder as in this process."""


class Stopped(RunError):
    """The comparison was interrupted; finished runs and checkpoints are kept."""

    exit_code = 130


@dataclass
class Pace:
    """Measures how long systems take, to estimate the remaining time."""

    total: int
    finished: list[float] = field(default_factory=list)
    done: int = 0

    def left(self, elapsed: float, share: float) -> float | None:
        """Estimated seconds until the end. share: of the running system's steps that are done; None while unknown."""
        whole = elapsed / share if share > 0.02 else None
        known = [*self.finished, *([whole] if whole is not None else [])]
        if not known:
            return None
        mean = sum(known) / len(known)
        rest = self.total - self.done - 1
        return max((whole if whole is not None else mean) - elapsed, 0) + rest * mean

    def rest(self) -> str:
        """The estimated time of the systems after this one, in words; empty for the last."""
        count = self.total - self.done
        return f", left {show_time(count * sum(self.finished) / len(self.finished))}" if count and self.finished else ""


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


def conduct(comparison: Comparison, describe: Callable[[str], str]) -> dict[str, str]:
    """Train every run that is not finished; returns the reasons of failed runs, by name.

    describe: gives a finished run's result in words.
    """
    waiting = [name for name in comparison.runs if not is_finished(comparison, name)]
    pace, failed = Pace(len(waiting)), {}
    with ComparisonDisplay(len(waiting)) as display:
        for name in waiting:
            start = time.monotonic()
            reason = _run_child(comparison, name, pace, display)
            spent = time.monotonic() - start
            pace.done += 1
            if reason is None:
                pace.finished.append(spent)
                display.say(f"{pace.done}/{pace.total} {name}: {describe(name)}, {show_time(spent)}{pace.rest()}")
            else:
                failed[name] = reason
                display.say(f"{pace.done}/{pace.total} {name} failed: {reason}")
    return failed


def is_finished(comparison: Comparison, name: str) -> bool:
    run = comparison.run_of(name)
    return run is not None and run.finished


def _run_child(comparison: Comparison, name: str, pace: Pace, display: ComparisonDisplay) -> str | None:
    """Run one system in its own process; None, or the reason why it failed."""
    with tempfile.TemporaryFile() as said:
        child = start_child(comparison.path, name, said)
        try:
            _watch(child, comparison, name, pace, display)
        except BaseException as error:
            stop_child(child)
            if not isinstance(error, KeyboardInterrupt):
                raise
            advice = "the same command goes on from here"
            raise Stopped(f"stopped during {name}, {pace.done} of {pace.total} systems finished; {advice}") from error
        return tell_failure(child, said, comparison.path / f"{name}.error.txt")


def tell_failure(child: subprocess.Popen[bytes], said: IO[bytes], log: Path) -> str | None:
    """Why an ended child failed, or None; what it said in several lines is written into the log."""
    log.unlink(missing_ok=True)  # the log of an earlier attempt
    if child.returncode == 0:
        return None
    said.seek(0)
    words = said.read().decode(errors="replace").strip()
    if not words or child.returncode < 0:
        return describe_end(child.returncode)
    if "\n" not in words:
        return words
    write_atomic(log, f"{words}\n".encode())
    return f"{find_reason(words)}; all it said is in {log}"


def find_reason(words: str) -> str:
    """The line of a traceback that names the error, without the paragraphs of advice that may follow it."""
    lines = words.splitlines()
    named = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Unsupported)\b", line)]
    return (named or lines)[-1]


def describe_end(code: int) -> str:
    """In words, how a child process ended that printed no reason."""
    if code >= 0:
        return f"its process ended with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
    return f"its process was killed by {name}{cause}"


def start_child(
    folder: Path, name: str, said: IO[bytes], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a child that gets no signals from the terminal: closing its standard input asks it to stop."""
    command = [sys.executable, "-P", "-c", START, str(Path(__file__).parents[2]), str(folder.resolve()), name]
    out = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=out, stderr=said, start_new_session=True, env=environment
    )


def _watch(
    child: subprocess.Popen[bytes], comparison: Comparison, name: str, pace: Pace, display: ComparisonDisplay
) -> None:
    """Show how far the child is until it ends."""
    start = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL)
            return
        if display.bar is not None:
            share = share_done(comparison, name)
            left = pace.left(time.monotonic() - start, share)
            rest = "" if left is None else f"  left {show_time(left)}"
            display.show(pace.done + share, f"{pace.done + 1}/{pace.total} {name} {share:.0%}{rest}")


def share_done(comparison: Comparison, name: str) -> float:
    """Share of a run's steps that are done, according to its last line of metrics."""
    path = comparison.path / name
    if not (path / "config.json").exists():
        return 0.0
    run = comparison.run_of(name)
    lines = run.read_speed() if run is not None else []
    return lines[-1]["step"] / run.config.train.steps if run is not None and lines else 0.0


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """Ask the child to save and end; after `PATIENCE` seconds it is killed."""
    assert child.stdin is not None
    with contextlib.suppress(OSError):
        child.stdin.close()
    try:
        child.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
