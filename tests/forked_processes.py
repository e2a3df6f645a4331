"""Run a command in two processes that train together: `python -m tests.forked_processes PORT COMMAND...`.

`accelerate launch` starts each process anew, and all of them load the same modules for seconds. Here they are loaded once, and
then the process is forked. The variables below are those that `accelerate launch` sets for its processes.
"""

import os
import sys

import torch._dynamo  # noqa: F401  (DDP needs it)

import expire_span.train.supervised  # noqa: F401  (loads torch and accelerate, before the fork)
from expire_span.cli import main

PROCESSES = 2


def run(rank: int, port: str, command: list[str]) -> int:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    os.environ |= {name: str(value) for name, value in names.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    return main(command)


if __name__ == "__main__":
    port, *command = sys.argv[1:]
    child = os.fork()
    if child == 0:
        sys.exit(run(1, port, command))
    code = run(0, port, command)
    _, status = os.waitpid(child, 0)
    sys.exit(code or os.waitstatus_to_exitcode(status))
