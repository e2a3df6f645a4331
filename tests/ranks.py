"""Processes that form a context group, started once for many cases: `with Ranks(4) as ranks: ranks.call(function, size, ...)`.

They are forked from a server that has loaded torch, and find each other through a file, so that no port is taken.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.forked import CONTEXT

PATIENCE = 30.0
"""Seconds that a case may take; a hang ends the test instead of the suite."""


class Ranks:
    """`call(function, size, *args)` runs function(group, *args) in the first `size` ranks and returns their results."""

    def __init__(self, count: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, count, self.folder.name, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()

    def call(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        among: list[int] | None = None,
        patience: float = PATIENCE,
    ) -> list[Any]:
        """among: the ranks whose results are waited for; all by default."""
        for pipe in self.pipes[:size]:
            pipe.send((function, size, args))
        pipes = [self.pipes[rank] for rank in (among or range(size))]
        hangs = (True, "a rank hangs")
        answers = [pipe.recv() if pipe.poll(patience) else hangs for pipe in pipes]
        failures = [text for failed, text in answers if failed]
        if hangs in answers:
            self.__exit__()  # what they still send belongs to no later case
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]


def _serve(rank: int, count: int, folder: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, count + 1)}
    while True:
        function, size, args = pipe.recv()
        try:
            pipe.send((False, function(groups[size], *args)))
        except Exception:
            pipe.send((True, f"rank {rank}: {traceback.format_exc()}"))
