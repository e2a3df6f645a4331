"""The progress display of training: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from expire_span.disk.sizes import show_bytes

__all__ = ["Clock", "Display", "Speed", "fit", "show_bytes", "show_time"]

SILENCE = 10.0
"""Longest time, in seconds, without a line where there is no terminal."""
BAR_WIDTH = 24
"""Columns of the bar on a terminal."""


def show_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def fit(parts: Sequence[str], width: int) -> str:
    """As many parts, from the first on, as fit into `width` columns."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if len(longer) > width:
            break
        text = longer
    return text


@dataclass(frozen=True)
class Speed:
    """What the `Clock` measured since the last line of metrics."""

    seconds: float
    """Seconds since training began or was resumed."""
    tokens_per_second: float
    """Tokens per second since the last line of metrics."""
    left: float
    """Estimated seconds for the remaining steps, or until the time limit if that comes first."""
    ms_per_step: float
    """Milliseconds per step since the last line of metrics."""


class Clock:
    """Speed between two lines of metrics, and the time left."""

    def __init__(self, step: int, limit: float | None = None) -> None:
        """limit: seconds after which training ends, whatever step it is at."""
        self.start = self.last = time.perf_counter()
        self.first_step = self.last_step = step
        self.limit = math.inf if limit is None else limit

    def read(self, step: int, tokens: int, total: int) -> Speed:
        now = time.perf_counter()
        spent = max(now - self.last, 1e-9)
        left = (total - step) * (now - self.start) / max(step - self.first_step, 1)
        left = min(left, max(self.limit - (now - self.start), 0.0))
        pace = 1000 * spent / max(step - self.last_step, 1)
        self.last, self.last_step = now, step
        return Speed(now - self.start, tokens / spent, left, pace)

    @property
    def elapsed(self) -> float:
        """Seconds since training began or was resumed, evaluations included."""
        return time.perf_counter() - self.start

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training steps."""
        self.last += seconds


class Heartbeat:
    """Lines on stderr about work that takes long: what was told, and again after every silence, so that no log stands still.

    A context manager. On a terminal, where a bar shows that work goes on, only `say` prints.
    """

    def __init__(self, name: str, silence: float = SILENCE) -> None:
        self.name, self.silence, self.began = name, silence, time.monotonic()
        self.told, self.printed, self.at = "starting", "", -1.0
        self.tells = False
        """Whether the last words came by `tell`, which are printed at the end in any case."""
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Heartbeat:
        if not sys.stderr.isatty():
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        with self._changed:
            if self._thread.ident is not None and self.tells and self.told != self.printed:
                self._print(least=0.0)
            self._ended = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def say(self, sentence: str) -> None:
        """Print a sentence as it is."""
        with self._changed:
            self.told = self.printed = sentence
            self.at = time.monotonic() - self.began
            print(sentence, file=sys.stderr, flush=True)

    def tell(self, told: str) -> None:
        """Print what is being done, if that is new and the last line at least a second old."""
        with self._changed:
            self.told, self.tells = told, True
            if self._thread.ident is not None and told != self.printed:
                self._print(least=1.0)

    def note(self, told: str) -> None:
        """Print what is being done only after the next silence."""
        with self._changed:
            self.told, self.tells = told, False

    def _run(self) -> None:
        with self._changed:
            while not self._changed.wait_for(lambda: self._ended, timeout=self.silence / 2):
                self._print(least=self.silence / 2)

    def _print(self, least: float) -> None:
        seconds = time.monotonic() - self.began
        if self.at >= 0 and seconds - self.at < least:
            return
        print(f"{self.name}: {self.told} ({seconds:.0f} s)", file=sys.stderr, flush=True)
        self.printed, self.at = self.told, seconds


class Display:
    """The progress display, a context manager around the training; only the first process shows anything."""

    def __init__(self, total: int, *, shown: bool = True, console: Console | None = None) -> None:
        self.total, self.shown = total, shown
        self.bar: Progress | None = None
        if shown and (console is not None or sys.stdout.isatty()):
            # The counter comes first and has the columns that it needs, so that a narrow terminal still shows it.
            columns = (MofNCompleteColumn(), BarColumn(bar_width=BAR_WIDTH), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=console or Console())
            self.job = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def start(self, step: int) -> None:
        """Training begins after `step` steps: 0, or where a resumed run goes on."""
        if self.bar is not None:
            self.bar.reset(self.job, total=self.total, completed=step)
            self.bar.start()  # not before: a resumed run must not show step 0 first
        elif step:
            self.say(f"step {step}/{self.total}  resumed")

    def advance(self, step: int) -> None:
        """One more step is done."""
        if self.bar is not None:
            self.bar.update(self.job, completed=step)

    def say(self, text: str) -> None:
        if not self.shown:
            return
        try:
            if self.bar is not None:
                self.bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except BrokenPipeError:  # the reader of our output has gone; training continues
            self.shown = False

    def train(self, step: int, parts: list[str], reading: Speed) -> None:
        """A line of training metrics, with the time left and tokens per second."""
        speed = f"{reading.tokens_per_second:,.0f} tokens/s"
        if self.bar is not None:
            # Columns that are left for the text beside the counter (two numbers and a slash), the bar, and two spaces.
            room = self.bar.console.width - 2 * len(str(self.total)) - 1 - BAR_WIDTH - 2
            text = fit([f"left {show_time(reading.left)}", *parts, speed], room)
            self.bar.update(self.job, description=text.replace("[", r"\["))
        else:
            self.say(f"step {step}/{self.total}  {'  '.join(parts)}  {speed}  left {show_time(reading.left)}")

    def valid(self, step: int, parts: list[str]) -> None:
        self.say(f"step {step}/{self.total}  valid  {'  '.join(parts)}")
