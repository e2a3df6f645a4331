"""The study's pool of processes: what happens to finished work when the parent or a worker is killed."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest

from expire_span.errors import RunError
from expire_span.lab.study.folder import StudyFolder
from expire_span.lab.study.pool import run_jobs
from tests.tiny import ROOT

KILLED = """
import time
from dataclasses import dataclass
from pathlib import Path
from expire_span.lab.study.folder import StudyFolder
from expire_span.lab.study.pool import run_jobs

@dataclass(frozen=True)
class Nap:
    name: str
    cost: float = 1.0

def work(nap, folder, tick):
    time.sleep(0.2)
    tick(nap.cost)
    return {"seconds": 0.2}

if __name__ == "__main__":
    folder = StudyFolder.open(Path("out"), "naps", {})
    print(sorted(run_jobs(work, [Nap(f"nap-{n}") for n in range(8)], folder, 2)))
"""


@pytest.mark.slow
def test_killed_work_goes_on(tmp_path):
    """Two processes work; the parent is killed; its workers end too; the same command then runs only what is missing."""
    (tmp_path / "go.py").write_text(KILLED)
    command, environment = [sys.executable, "go.py"], {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 120
    while not list(tmp_path.glob("out/cells/*.json")) and time.monotonic() < limit:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)  # the pipe closes when the last worker has gone
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/cells/*.json")}
    assert 1 <= len(before) < 8
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and f"{len(before)} of 8 cells were finished already" in again.stdout, again.stderr
    assert again.stdout.splitlines()[-1] == str([f"nap-{n}" for n in range(8)])
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())


@dataclasses.dataclass(frozen=True)
class Fatal:
    """A job that kills the process that unpacks it."""

    name: str = "fatal"
    cost: float = 1.0

    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)


def test_a_killed_worker_is_told(tmp_path):
    with pytest.raises(RunError, match=r"a process of the study was killed, .* the same command goes on with the rest"):
        run_jobs(print, [Fatal()], StudyFolder.open(tmp_path, "deaths", {}), 1)
