"""Numeric options at sizes that no machine has: refused in one sentence, in bounded memory and time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.tiny import ROOT

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of processes as Linux does")


def check(folder, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.huge_sizes", str(folder), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_a_sample_of_huge_sizes(tmp_path):
    check(tmp_path, "12")


@pytest.mark.long
def test_all_huge_sizes(tmp_path):
    check(tmp_path)
