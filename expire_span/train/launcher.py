"""Workers of `accelerate launch` and torchrun end when their launcher does. Standard library only."""

from __future__ import annotations

import os
import sys
import threading
import time

CHECK_EVERY = 1.0
"""Seconds between two looks at the launcher."""
MARK = "TORCHELASTIC_RUN_ID"
"""A variable of the environment that launchers of workers set for them."""
_watching: list[threading.Thread] = []


def follow_launcher() -> None:
    """Let this process end, with a sentence, once its launcher is gone; nothing happens in a process that has none.

    Workers find each other through their launcher: without it they may wait for one another for minutes. A thread looks for it,
    since the main thread may be inside of such a wait. What has been saved stays whole, as after any kill.
    """
    if MARK in os.environ and not _watching:
        _watching.append(threading.Thread(target=_watch, args=(os.getppid(),), daemon=True))
        _watching[0].start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(CHECK_EVERY)
    print(
        f"expire-span: the launcher of this worker (process {launcher}) has ended, so the worker ends too; start it "
        "again, with resume if the run had begun",
        file=sys.__stderr__,  # options are parsed with sys.stderr put aside
        flush=True,
    )
    os._exit(1)
