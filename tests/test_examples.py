"""The examples run as they are, and print what they promise."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from expire_span.models import systems

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def run_example(capsys, monkeypatch):
    """Run an example as `python examples/NAME ARGUMENTS` does, in this process: a new one would load torch again."""

    def run(name: str, *arguments: str) -> str:
        path = str(ROOT / "examples" / name)
        monkeypatch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def no_system_stays(monkeypatch):
    """Forget the memory systems that the test registers: other tests read the list."""
    monkeypatch.setattr(systems, "MixerConfig", systems.MixerConfig)
    before = dict(systems.SYSTEMS)
    yield
    systems.SYSTEMS.clear()
    systems.SYSTEMS.update(before)


def test_operator(run_example):
    assert "memories kept" in run_example("01_operator.py")


def test_stream(run_example):
    held = re.findall(r"(\d+) bytes held", run_example("02_stream.py"))
    assert len(held) == 6 and len(set(held[2:])) == 1


@pytest.mark.long
def test_train_tiny(run_example, tmp_path):
    """The short twin is test_cli.py::test_demo_and_report, which trains and reports with fewer steps."""
    out = run_example("03_train_tiny.py", str(tmp_path))
    success = re.search(r"success ([\d.]+)%", out)
    alive = re.search(r"alive: ([\d.]+)", out)
    assert success and float(success[1]) >= 90, out
    assert alive and float(alive[1]) < 12, out
    assert (tmp_path / "tiny" / "report.html").is_file()


def test_own_memory_system(run_example, no_system_stays, tmp_path):
    assert "100% of the colours" in run_example("04_own_memory_system.py", str(tmp_path))


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    assert all(path.name in source for path in (ROOT / "examples").glob("*.py"))
