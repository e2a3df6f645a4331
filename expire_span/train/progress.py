"""What training shows: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from expire_span.runs import RunFolder


def show_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def show_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def describe(line: dict[str, Any], score_name: str) -> str:
    """One line of metrics in words."""
    live = " ".join(f"{x:.1f}" for x in line["live"])
    text = f"loss {line['loss']:.4f}  {score_name} {line['score']:.4f}  live {live}"
    return f"{text}  held {show_bytes(line['bytes_held'])}"


class Display:
    """Open it around the training; only the first process shows anything."""

    def __init__(self, total: int, score_name: str, *, shown: bool = True) -> None:
        self.total, self.score_name, self.shown = total, score_name, shown
        self.bar: Progress | None = None
        if shown and sys.stdout.isatty():
            columns = (MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=Console())
            self.job = self.bar.add_task("starting", total=total)

    def __enter__(self) -> Display:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def say(self, text: str) -> None:
        if not self.shown:
            return
        try:
            if self.bar is not None:
                self.bar.console.print(text, markup=False, highlight=False)
            else:
                print(text, flush=True)
        except BrokenPipeError:  # whoever was reading has gone; the training goes on
            self.shown = False

    def train(self, line: dict[str, Any], speed: float, left: float) -> None:
        """A line of training metrics, with tokens per second and seconds left."""
        text = f"{describe(line, self.score_name)}  {speed:,.0f} tokens/s  left {show_time(left)}"
        if self.bar is not None:
            self.bar.update(self.job, completed=line["step"], description=text)
        else:
            self.say(f"step {line['step']}/{self.total}  {text}")

    def valid(self, line: dict[str, Any]) -> None:
        self.say(f"step {line['step']}/{self.total}  valid  {describe(line, self.score_name)}")


class Clock:
    """Speed between two lines of metrics, and the time left."""

    def __init__(self, step: int) -> None:
        self.start = self.last = time.perf_counter()
        self.first_step = self.last_step = step

    def read(self, step: int, tokens: int, total: int) -> tuple[float, float, float, float]:
        """Seconds since the start, tokens per second since the last reading, seconds left, milliseconds per step."""
        now = time.perf_counter()
        spent = max(now - self.last, 1e-9)
        left = (total - step) * (now - self.start) / max(step - self.first_step, 1)
        pace = 1000 * spent / max(step - self.last_step, 1)
        self.last, self.last_step = now, step
        return now - self.start, tokens / spent, left, pace

    def pause(self, seconds: float) -> None:
        """Leave out time that was not spent on training steps."""
        self.last += seconds


class Board:
    """The same scalars for TensorBoard."""

    def __init__(self, run: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=step + 1)

    def add(self, line: dict[str, Any]) -> None:
        for name, value in line.items():
            if name in ("live", "span"):
                for layer, x in enumerate(value):
                    self.writer.add_scalar(f"{line['split']}/{name}/{layer}", x, line["step"])
            elif isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(f"{line['split']}/{name}", value, line["step"])

    def close(self) -> None:
        self.writer.close()
