"""Processes forked from one that has loaded the modules, so that each starts within a moment instead of seconds.

One such fork server is shared by all tests of a pytest process: the first list of modules that it is given holds for all.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import tempfile
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "torch._dynamo",
        "expire_span.ops",
        "expire_span.models.decoder",
        "expire_span.train.supervised",
        "expire_span.cli.serve",
        "expire_span.serve.http",
        "tests.hf_models",
        "tests.ranks",
        "tests.served",
    ]
)


class Forked:
    """A command in a real process of its own, which is used like a Popen: `Forked("train", "text_tiny")`.

    variables: what it finds in its environment beside the usual.
    """

    def __init__(self, *args: str, variables: dict[str, str] | None = None) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.process = CONTEXT.Process(target=_run, args=(args, self.folder.name, variables or {}), daemon=True)
        self.process.start()
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)  # type: ignore[arg-type]

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has written to its output and its errors, once it has ended."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.kill()
            raise subprocess.TimeoutExpired(str(self.process.name), timeout or 0)
        return self.said("out"), self.said("err")

    def said(self, name: str) -> str:
        """What it has written until now; name: out or err."""
        path = Path(self.folder.name) / name
        return path.read_text() if path.exists() else ""


def fork_several(*args: str, port: int, processes: int = 2) -> list[Forked]:
    """A command in several processes that train together, with the variables of `accelerate launch`."""
    names = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{name: str(x) for name, x in {**names, "RANK": n, "LOCAL_RANK": n}.items()} for n in range(processes)]
    return [Forked(*args, variables=rank) for rank in ranks]


def call_several(*args: str, port: int, processes: int = 2, timeout: float = 120) -> tuple[int, str]:
    """Exit code and output of such a command."""
    started = fork_several(*args, port=port, processes=processes)
    told = ["".join(process.communicate(timeout)) for process in started]
    return next((p.returncode for p in started if p.returncode), 0), "".join(told)


def _run(args: tuple[str, ...], folder: str, variables: dict[str, str]) -> None:
    import sys

    import torch

    from expire_span.__main__ import main

    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a fork server's children ignore it
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = ["expire-span", *args]
    sys.exit(main())
