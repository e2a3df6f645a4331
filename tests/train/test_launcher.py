"""Workers end when their launcher is killed, whatever they are waiting for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expire_span.train.launcher import MARK
from tests.tiny import ROOT, spawn
from tests.train.test_ddp import launcher

WORKER = """
import os, subprocess, sys, time
worker = subprocess.Popen(sys.argv[1:], stderr=open("err", "w"), stdout=subprocess.DEVNULL)
print(worker.pid, flush=True)
time.sleep(100)
"""
WAITS = "from expire_span.train.launcher import follow_launcher as f; f(); f(); import signal; signal.sigwait([])"
TRAINS = ("-m", "expire_span", "train", "recall", "--train.steps", "1000000", "--runs-dir", "runs")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline:
            for pid in filter(is_alive, pids):
                os.kill(pid, signal.SIGKILL)
            pytest.fail("workers outlived their launcher")
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("command", [("-c", WAITS), TRAINS], ids=["waiting in C", "the command line"])
def test_a_worker_ends_with_its_launcher(tmp_path, command):
    env = os.environ | {MARK: "none", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    parent = subprocess.Popen(
        [sys.executable, "-c", WORKER, sys.executable, *command],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    end = time.monotonic() + 30
    while len(list(Path(f"/proc/{worker}/task").iterdir())) == 1:  # it looks for its launcher in a thread of its own
        assert is_alive(worker) and time.monotonic() < end, "the worker does not look for its launcher"
        time.sleep(0.05)
    parent.kill()
    parent.communicate()
    wait_until_gone([worker], 20)
    said = (tmp_path / "err").read_text()
    assert f"the launcher of this worker (process {parent.pid}) has ended, so the worker ends too" in said


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("after", [3, 5, 8, 12])
def test_killing_only_the_launcher_of_two_workers(tmp_path, after):
    """The short twin above has one worker, which waits for no other."""
    process = spawn(*TRAINS[2:5], "1000000", "--runs-dir", str(tmp_path), launcher=launcher("ddp"))
    time.sleep(after)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    wait_until_gone([int(pid) for pid in children], 20)
    process.communicate()
