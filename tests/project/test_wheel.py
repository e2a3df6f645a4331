"""The wheel holds what a run needs and nothing else, and works in a folder of its own, far from the source tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE")
WATCH = """
import json, runpy, sys
source, commands = sys.argv[1], json.loads(sys.argv[2])
def refuse(event, args):
    if event == "open" and str(args[0]).startswith(source):
        raise RuntimeError(f"the installed package read {args[0]} from the source tree")
sys.addaudithook(refuse)
for command in commands:
    sys.argv[1:] = command
    try:
        runpy.run_module("expire_span", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise
"""
"""Runs `python -m expire_span` for each command in one process, and stops it if it opens a file of the source package."""
TINY_RUN = (
    *("--train.steps", "3", "--train.batch", "64", "--train.device", "cpu", "--train.eval-batches", "1"),
    *("--model.dim", "16", "--model.layers", "1", "--model.ff-dim", "16"),
    *("--task.min-length", "4", "--task.max-length", "8", "--train.block", "10"),
)


def call(*command: str, cwd: Path, path: Path | None = None) -> str:
    """Run a command to its end and return what it printed; `path` is all that PYTHONPATH names."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(path)} if path else {})
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing an older build left behind can slip in."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    shutil.copytree(ROOT / "expire_span", copy / "expire_span", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
    for name in SOURCES:
        shutil.copy(ROOT / name, copy / name)
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(copy), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel) -> Path:
    """An empty folder with the wheel in it, dependencies left to the environment."""
    target = wheel.parent / "installed"
    options = ("--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check")
    call(sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(wheel), cwd=wheel.parent)
    return target


def test_contents(wheel):
    with ZipFile(wheel) as file:
        names = set(file.namelist())
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "expire_span").rglob("*") if p.is_file()}
    sources = {name for name in sources if "__pycache__" not in name}
    assert {"expire_span/view/report.html", "expire_span/py.typed"} <= names
    assert {name for name in names if name.startswith("expire_span/")} == sources
    assert {name.split("/")[0].split("-")[0] for name in names} == {"expire_span"}


@pytest.mark.slow
def test_runs_elsewhere(installed, tmp_path):
    commands = [["recipes"], ["train", "recall", "--name", "tiny", *TINY_RUN], ["report", "tiny"]]
    source = f"{ROOT / 'expire_span'}{os.sep}"
    said = call(sys.executable, "-c", WATCH, source, json.dumps(commands), cwd=tmp_path, path=installed)
    assert "Remember a colour" in said and "report.html" in said
    assert json.loads((tmp_path / "runs" / "tiny" / "result.json").read_text())["step"] == 3
    assert (tmp_path / "runs" / "tiny" / "report.html").stat().st_size > 10_000


def test_entry_point(installed):
    (metadata,) = installed.glob("expire_span-*.dist-info")
    assert "expire-span = expire_span.__main__:main" in (metadata / "entry_points.txt").read_text()
    assert "MIT" in (metadata / "METADATA").read_text()
