"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run_example(name: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_operator():
    assert "memories kept" in run_example("01_operator.py")


def test_stream():
    held = re.findall(r"(\d+) bytes held", run_example("02_stream.py"))
    assert len(held) == 6 and len(set(held[2:])) == 1


@pytest.mark.long
def test_train_tiny(tmp_path):
    """The short twin is test_cli.py::test_demo_and_report, which trains and reports with fewer steps."""
    out = run_example("03_train_tiny.py", str(tmp_path))
    success = re.search(r"success ([\d.]+)%", out)
    alive = re.search(r"alive: ([\d.]+)", out)
    assert success and float(success[1]) >= 90, out
    assert alive and float(alive[1]) < 12, out
    assert (tmp_path / "tiny" / "report.html").is_file()


def test_own_memory_system(tmp_path):
    assert "100% of the colours" in run_example("04_own_memory_system.py", str(tmp_path))


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    assert all(path.name in source for path in (ROOT / "examples").glob("*.py"))
