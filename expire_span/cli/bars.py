"""Progress bars on stderr for commands that take a while."""

from __future__ import annotations

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


@contextmanager
def steady_progress(
    name: str, silence: float | None = None, unit: str = "answers", *, seldom: bool = False
) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal; elsewhere a line on stderr whenever something has changed, and at least every `silence` seconds, ten
    where it is None. unit: what is counted; seldom: the line comes after these seconds only.

    Yields the function that sets what is being done, how much is done, and the total.
    """
    from rich.console import Console

    from expire_span.train.progress import SILENCE, Heartbeat

    if Console(stderr=True).is_terminal:
        with progress_bar(name) as bar:
            yield lambda told, done, total: bar(done, total)
        return
    with Heartbeat(name, SILENCE if silence is None else silence) as lines:
        tell = lines.note if seldom else lines.tell
        yield lambda told, done, total: tell(f"{done} of {total} {unit}" + (f", {told}" if told else ""))
