"""A whole comparison in real processes: interrupted, continued, measured, and shown on its page."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expire_span.cli import main
from expire_span.lab.compare import conduct
from expire_span.lab.compare.outcome import read_outcome
from expire_span.lab.compare.page import write_page
from expire_span.lab.compare.plan import Comparison
from expire_span.lab.compare.table import as_markdown
from expire_span.lab.compare.worker import run_system
from expire_span.models.decoder import Decoder
from expire_span.recipes import text_tiny
from expire_span.runs import RunFolder
from expire_span.view.efficiency import tabulate
from tests.browser import find_chromium
from tests.tiny import as_options, noisy_config, spawn, write_text

CHROMIUM = find_chromium()


# A whole comparison


def options(tmp_path: Path, **train) -> list[str]:
    config = noisy_config(write_text(tmp_path), steps=24, checkpoint_every=3, eval_every=12, **train)
    return [*as_options(config, text_tiny()), "--runs-dir", str(tmp_path / "runs")]


def command(tmp_path: Path, name: str) -> list[str]:
    return ["compare", "text_tiny", "--mixers", "gru_torch,expire_span", "--name", name, *options(tmp_path)]


def start(tmp_path: Path, name: str) -> subprocess.Popen[str]:
    return spawn(*command(tmp_path, name))


def finished(tmp_path: Path, name: str) -> dict[str, bytes]:
    """Everything deterministic that the runs of a comparison left."""
    files = [p for p in (tmp_path / "runs" / name).rglob("*") if p.name in ("metrics.jsonl", "result.json")]
    return {str(p.relative_to(tmp_path / "runs" / name)): p.read_bytes() for p in files}


def wait_until(condition, process, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def child_of(name: str) -> list[int]:
    """Process ids of workers on a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"expire_span.lab.compare.worker" in word for word in words) and name.encode() in b" ".join(words):
            found.append(int(path.parent.name))
    return found


class Child:
    """A run that was made in this process, in the place of a child process; `reason` is why it failed."""

    def __init__(self, said, reason: str | None) -> None:
        self.stdin, self.returncode = SimpleNamespace(close=lambda: None), int(reason is not None)
        said.write((reason or "").encode())

    def wait(self, seconds: float | None = None) -> int:
        return self.returncode

    poll = wait


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    """A comparison of two systems that was not interrupted.

    The first system has a process of its own, as users' systems do; the second one is trained in this process.
    """
    folder, said, threads = tmp_path_factory.mktemp("compare"), io.StringIO(), torch.get_num_threads()
    real = conduct.start_child

    def start(folder: Path, name: str, said, *more) -> Any:
        return real(folder, name, said, *more) if name == "gru_torch-seed0" else Child(said, run_system(folder, name))

    torch.set_num_threads(1)  # as child processes have it: equal bits need equally many threads
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
            patch.setattr(conduct, "start_child", start)
            patch.setenv("OMP_NUM_THREADS", "1")
            assert main(command(folder, "whole")) == 0
    finally:
        torch.set_num_threads(threads)
    (folder / "out.txt").write_text(said.getvalue())
    return folder


def interrupt(folder: Path, name: str, run: str, signum: int) -> tuple[int, str, Path]:
    """Send a signal to a comparison while `run` is in training, and wait until no process of it is left."""
    process = start(folder, name)
    path = folder / "runs" / name / run
    wait_until(lambda: (path / "metrics.jsonl").exists() and (path / "metrics.jsonl").stat().st_size > 900, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=200)
    wait_until(lambda: not child_of(str(folder / "runs" / name)), None, seconds=120)
    assert not (path / "result.json").exists()
    return process.returncode, err, path


def goes_on_as_if_nothing_had_happened(unbroken: Path, name: str) -> None:
    """The finished system is not run again, and all metrics equal the undisturbed ones."""
    first = unbroken / "runs" / name / "gru_torch-seed0"
    before = {p: p.stat().st_mtime_ns for p in first.rglob("*")}
    process = start(unbroken, name)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert {p: p.stat().st_mtime_ns for p in first.rglob("*")} == before
    assert finished(unbroken, name) == finished(unbroken, "whole") and len(finished(unbroken, name)) == 4


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_killed_then_resumed(unbroken):
    """No process stays behind. The short twin of this test sends Ctrl-C; a killed worker is told of in test_errors.py."""
    interrupt(unbroken, "killed", "expire_span-seed0", signal.SIGKILL)
    goes_on_as_if_nothing_had_happened(unbroken, "killed")


def test_ctrl_c_ends_the_worker_and_says_how_to_go_on(tmp_path, monkeypatch):
    workers = []

    def start(*_):
        waits = [sys.executable, "-c", "import sys; sys.stdin.read()"]  # a worker ends when its input is closed
        workers.append(subprocess.Popen(waits, stdin=subprocess.PIPE))
        return workers[0]

    def watch(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(conduct, "start_child", start)
    monkeypatch.setattr(conduct.Conductor, "_wait", watch)
    comparison = SimpleNamespace(path=tmp_path, runs=["gru-seed0"], run_of=lambda _name: None)
    with pytest.raises(conduct.Stopped, match="stopped with 0 of 1 runs finished; the same command goes on"):
        conduct.conduct(comparison, str)  # type: ignore[arg-type]
    assert workers[0].poll() is not None, "the worker must not go on alone"


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    code, err, first = interrupt(tmp_path, "asked", "gru_torch-seed0", signal.SIGINT)
    assert code == 130 and "0 of 2 runs finished; the same command goes on" in err and "Traceback" not in err, err
    newest = max(p.name for p in (first / "checkpoints").iterdir())
    steps = [json.loads(line)["step"] for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert int(newest.removeprefix("step-")) >= max(steps), "what was trained when the signal came is saved"


@pytest.mark.slow
def test_outcome_is_measured(unbroken):
    comparison = Comparison.open(unbroken / "runs" / "whole")
    outcome = read_outcome(comparison)
    rows = {row.label: row for row in outcome.rows}
    run = RunFolder.open(comparison.path / "expire_span-seed0")
    result = run.read_result()
    row = rows["expire_span"]
    assert (
        row.score == result["score"] and row.live == sum(result["live"]) / 2 and row.bytes == result["mean_bytes"] / 4
    )
    assert row.steps == 24 and row.ms_per_step > 0 and row.tokens_per_second > 0 and row.device_bytes > 1e7
    assert row.parameters == sum(p.numel() for p in Decoder(run.config.model).parameters())
    assert rows["gru_torch"].live == 1 and abs(rows["gru_torch"].parameters / row.parameters - 1) < 0.01
    table = json.loads((comparison.path / "table.json").read_text())
    assert [r["label"] for r in table["rows"]] == ["gru_torch", "expire_span"]
    assert as_markdown(outcome) == (comparison.path / "table.md").read_text()
    said = (unbroken / "out.txt").read_text()
    assert f"{row.parameters:,} parameters" in said and "1/2 gru_torch-seed0: bpb" in said and "compare.html" in said


@pytest.mark.slow
def test_other_settings_are_refused_and_more_systems_are_added(unbroken, call_compare, monkeypatch):
    shutil.copytree(unbroken / "runs" / "whole", unbroken / "runs" / "grown")
    base = ["text_tiny", "--mixers", "gru_torch,expire_span", "--name", "grown", *options(unbroken)]
    before = finished(unbroken, "grown")
    for change, words in (
        (["--train.steps", "9"], "train.steps 24, got 9"),
        (["--train-seconds", "9"], "train seconds None, got 9.0"),
        (["--model.mixer.max-span", "32"], "model.mixer.max_span 64, got 32"),
    ):
        code, _, err = call_compare(*base, *change)
        assert code == 2 and words in err and "another --name" in err, err
    code, _, err = call_compare("recall", "--mixers", "full", "--name", "grown", "--runs-dir", str(unbroken / "runs"))
    assert code == 2 and "is of recipe text_tiny, got recall" in err
    made = []
    monkeypatch.setattr(conduct, "start_child", lambda _, name, said, *__: made.append(name) or Child(said, "no time"))
    code, _, err = call_compare(*base, "--mixers", "gru_torch,expire_span,full", "--seeds", "2")
    assert code == 1 and "the same command tries again" in err
    assert made == ["full-seed0", "gru_torch-seed1", "expire_span-seed1", "full-seed1"]
    assert finished(unbroken, "grown") == before


@pytest.mark.slow
def test_folders_of_something_else_are_refused(unbroken, call_compare):
    runs = ["--runs-dir", str(unbroken / "runs" / "whole")]
    code, _, err = call_compare("recall", "--mixers", "full", "--name", "gru_torch-seed0", *runs)
    assert code == 2 and "is the folder of a run, not of a comparison" in err
    (unbroken / "runs" / "other").mkdir()
    (unbroken / "runs" / "other" / "notes.txt").write_text("mine")
    code, _, err = call_compare("recall", "--mixers", "full", "--name", "other", "--runs-dir", str(unbroken / "runs"))
    assert code == 2 and "is no comparison" in err
    shutil.copytree(unbroken / "runs" / "whole", unbroken / "runs" / "mixed")
    shutil.rmtree(unbroken / "runs" / "mixed" / "gru_torch-seed0")
    shutil.copytree(unbroken / "runs/mixed/expire_span-seed0", unbroken / "runs/mixed/gru_torch-seed0")
    base = ["text_tiny", "--mixers", "gru_torch", "--name", "mixed", *options(unbroken)]
    code, _, err = call_compare(*base)
    assert code == 2 and "belongs to another run: it has" in err, err
    told = unbroken / "runs/mixed/compare.json"
    told.write_text(told.read_text().replace('"format": 2', '"format": 9', 1))
    code, _, err = call_compare(*base)
    assert code == 2 and "has format 9" in err


@pytest.mark.slow
def test_page_is_self_contained(unbroken):
    comparison = Comparison.open(unbroken / "runs" / "whole")
    page = (comparison.path / "compare.html").read_text()
    assert "http" not in page and "prefers-color-scheme: dark" in page and page.count("<svg") == 5
    assert 'data-value="expire_span"' in page and "memories alive" in page
    assert (comparison.path / "curve.png").read_bytes().startswith(b"\x89PNG")
    table = tabulate(RunFolder.open(comparison.path / "expire_span-seed0"), None)  # as the run's own report shows it
    assert [row[0] for row in table.rows] == ["gru_torch", "expire_span"] and table.own == 1
    assert table.told == read_outcome(comparison).conditions and all(cell in page for row in table.rows for cell in row)
    empty = replace(comparison, path=unbroken / "empty", runs=comparison.runs)
    (unbroken / "empty").mkdir()
    assert "No run is finished yet" in write_page(read_outcome(empty)).read_text()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
def test_page_sorts_in_a_browser(unbroken, tmp_path):
    page = (unbroken / "runs" / "whole" / "compare.html").read_text()
    click = "<script>for (let n = 0; n < CLICKS; n++) headings[0].click();</script></body>"
    orders = []
    for clicks in (1, 2):
        path = tmp_path / f"{clicks}.html"
        path.write_text(page.replace("</body>", click.replace("CLICKS", str(clicks))))
        browse = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
        dom = subprocess.run(browse, capture_output=True, text=True, timeout=90).stdout
        assert "<svg" in dom
        orders.append(dom.index('data-value="expire_span"') < dom.index('data-value="gru_torch"'))
    assert orders == [True, False]
