"""No command, and no worker that it starts, runs a Python file that lies in the current folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from expire_span.lab.compare.children import start_child
from expire_span.recipes import text_tiny
from tests.tiny import as_options, spawn, tiny_config, write_text


def test_workers_of_a_comparison_run_no_file_of_the_current_folder(tmp_path, monkeypatch):
    for name in ("safetensors", "accelerate", "expire_span"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with open(tmp_path / "said", "wb") as said:
        child = start_child(tmp_path / "nothing", "x", said)
        child.wait(timeout=60)
    assert child.returncode == 2 and "is no comparison" in (tmp_path / "said").read_text()
    assert not list(tmp_path.glob("ran-*"))


PLANTED = ("safetensors", "torch", "numpy", "expire_span", "tyro", "accelerate", "rich", "jinja2", "matplotlib")
PLANTED += ("multiprocessing", "pickle", "socket", "json", "random", "signal", "struct", "tokenizers", "fastapi")
INSTALLED = """
import multiprocessing, sys
from expire_span.__main__ import main
if __name__ == "__main__":
    for command in sys.argv[1].split(";"):
        sys.argv = ["expire-span", *command.split()]
        assert main() == 0, command
    child = multiprocessing.get_context("spawn").Process(target=print)  # as a study does
    child.start()
    child.join()
    assert child.exitcode == 0
"""


def check_planted(tmp_path: Path, commands: str) -> None:
    """Started as installed commands are, from a script elsewhere; workers are started by Python, which looks here first."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "script.py").write_text(INSTALLED)
    (tmp_path / "here").mkdir()
    for name in PLANTED:
        (tmp_path / "here" / f"{name}.py").write_text(f"open('ran-{name}', 'w').close()\n")
    process = spawn(commands, launcher=(str(tmp_path / "bin" / "script.py"),), cwd=tmp_path / "here")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert not list((tmp_path / "here").glob("ran-*"))


def test_a_command_and_its_workers_run_no_file_of_the_current_folder(tmp_path):
    check_planted(tmp_path, "recipes")


@pytest.mark.long
def test_no_command_runs_a_file_of_the_current_folder(tmp_path):
    options = " ".join(as_options(tiny_config(write_text(tmp_path), steps=2, test_batches=1), text_tiny()))
    commands = [f"train text_tiny {options}", "eval text_tiny --batches 1", "report text_tiny"]
    commands += ["trace text_tiny --tokens 3", f"compare text_tiny --mixers gru {options}"]
    check_planted(tmp_path, ";".join(commands))
