"""Progress bars on stderr for commands that take a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(name: str, shown: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """A bar that disappears when the work is done; yields the function that sets how much of the total is done. Without a
    terminal nothing is shown."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


SILENCE = 10.0
"""Longest time, in seconds, without a line where there is no terminal."""


@contextmanager
def steady_progress(name: str, silence: float = SILENCE) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a line on stderr whenever something has changed, and at least every `silence` seconds.

    Yields the function that sets what is being done, how much is done, and the total.
    """
    from rich.console import Console

    if Console(stderr=True).is_terminal:
        with progress_bar(name) as bar:
            yield lambda told, done, total: bar(done, total)
        return
    lines = _Lines(name, silence)
    try:
        yield lines.tell
    finally:
        lines.end()


class _Lines:
    """Prints what was told last: at once if it is new and the last line is a second old, and again after every silence."""

    def __init__(self, name: str, silence: float) -> None:
        self.name, self.silence, self.began = name, silence, time.monotonic()
        self.told, self.printed, self.at = "starting", "", -1.0
        self.changed = threading.Condition()
        self.ended = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def tell(self, told: str, done: int, total: int) -> None:
        with self.changed:
            self.told = f"{done} of {total} answers, {told}"
            self._print(least=1.0)

    def end(self) -> None:
        with self.changed:
            self.ended = True
            self._print(least=0.0)
            self.changed.notify()
        self.thread.join()

    def _run(self) -> None:
        with self.changed:
            while not self.changed.wait_for(lambda: self.ended, timeout=self.silence):
                self._print(least=self.silence / 2, again=True)

    def _print(self, least: float, again: bool = False) -> None:
        seconds = time.monotonic() - self.began
        if (self.told == self.printed and not again) or (self.at >= 0 and seconds - self.at < least):
            return
        print(f"{self.name}: {self.told} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        self.printed, self.at = self.told, seconds
