"""Ctrl-C and SIGTERM as a request to stop, which the training loop checks between two steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from expire_span.runs import RunError


class Interrupted(RunError):
    """Training was asked to stop and has saved a checkpoint."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class StopRequest:
    """A context manager in which the first signal only sets `signum`; a second one acts at once, as without it."""

    def __init__(self) -> None:
        self.signum = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self.__exit__()
