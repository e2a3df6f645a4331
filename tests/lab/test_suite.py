"""Comparisons in several environments: side by side, resumed after interruption, one table and one picture."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("gymnasium")

from expire_span.lab.compare import conduct
from expire_span.lab.compare.suite import parse_environments
from expire_span.lab.compare.suite_outcome import Cell, EnvironmentRow, SuiteOutcome, half_width
from expire_span.lab.compare.worker import run_system
from tests.lab.test_compare_runs import Child, child_of, wait_until
from tests.tiny import spawn

CORRIDOR, ECHO = "ExpireSpan/Corridor-Easy-v0", "tests.tiny_agents:Tiny/Echo-v0"
SIZES = {
    "envs": 4,
    "window": 6,
    "minibatches": 1,
    "eval-episodes": 4,
    "test-episodes": 4,
    "eval-every": 2,
    "log-every": 1,
}


def words(folder: Path, *more: str, envs: str = f"{ECHO},{CORRIDOR}", steps: int = 2) -> list[str]:
    train = [word for name, value in SIZES.items() for word in (f"--train.{name}", str(value))]
    usual = ["--mixers", "expire_span,gru", "--train.steps", str(steps), "--train.device", "cpu", "--name", "s"]
    return ["agent", "--envs", envs, *usual, *train, "--runs-dir", str(folder / "runs"), *more]


def test_systems_in_several_environments(call_compare, tmp_path, monkeypatch):
    """A failed run is told and tried again; finished ones are not run again; environments are added under the same name."""
    started = []

    def start(folder: Path, name: str, said, environment) -> Child:
        assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
        started.append((folder.name, name))
        fails = "fails" in os.environ.get("TINY", "") and name == "gru-seed0"
        return Child(said, "the environment is closed today" if fails else run_system(folder, name))

    monkeypatch.setattr(conduct, "start_child", start)
    monkeypatch.setenv("TINY", "fails")
    code, out, err = call_compare(*words(tmp_path, envs=ECHO))
    assert code == 1 and "Echo" in err and "the environment is closed today" in err and "tries again" in err
    assert "not finished" in out
    monkeypatch.delenv("TINY")
    started.clear()
    code, out, _ = call_compare(*words(tmp_path, "--seeds", "2", "--jobs", "3"))
    assert code == 0
    echo, corridor = "Tiny-Echo-v0", "ExpireSpan-Corridor-Easy-v0"
    assert (echo, "expire_span-seed0") not in started and (echo, "gru-seed0") in started
    assert {name for name, _ in started[:2]} == {echo, corridor} and len(started) == 7
    folder = tmp_path / "runs" / "s"
    table = (folder / "table.md").read_text()
    assert table in out and f"| {echo} | 48 |" in table and "mean of 2, scaled" in table
    told = json.loads((folder / "table.json").read_text())
    chance = json.loads((folder / corridor / "random.json").read_text())
    assert told["rows"][1]["random"] == chance["score"] and told["rows"][1]["score"] == "success"
    assert len(told["rows"][0]["cells"]["gru"]["scores"]) == 2
    assert (folder / "curves.png").stat().st_size > 10_000
    started.clear()
    assert call_compare(*words(tmp_path, "--seeds", "2"))[0] == 0 and not started
    code, _, err = call_compare(*words(tmp_path, steps=3))
    assert code == 2 and "train.steps 2, got 3" in err


def test_the_table_by_hand():
    """Intervals of the mean of three seeds, scaled means over shared environments only, unfinished seeds counted."""
    spread = math.sqrt(((0.1**2) + 0 + (0.1**2)) / 2)
    assert half_width([0.4, 0.5, 0.6]) == pytest.approx(4.303 * spread / math.sqrt(3))
    assert half_width([0.5]) is None
    three, one = Cell([0.4, 0.5, 0.6], 3, 7.25), Cell([0.25], 2, 1.0)
    first = EnvironmentRow("a", "return", 2000, -0.5, 0.7, {"x": three, "y": one}, {})
    second = EnvironmentRow("b", "success", 2000, 0.5, None, {"x": Cell([1.0], 1, 3.0), "y": Cell([0.5], 1, 1.0)}, {})
    alone = EnvironmentRow("c", "return", 2000, 0.0, None, {"x": Cell([0.0], 1, 3.0)}, {})
    table = SuiteOutcome([first, second, alone], ["x", "y"], "So it was.").as_markdown().splitlines()
    assert table[2] == "| a | 2,000 | -0.500 | 0.500 ± 0.248 (3; 7.2 alive) | 0.250 (1 of 2 seeds; 1.0 alive) | 0.700 |"
    assert "not finished" in table[4]
    x, y = ((0.5 + 0.5) / 1.5 + 1) / 2, ((0.25 + 0.5) / 1.5 + 0) / 2
    assert table[5] == f"| mean of 2, scaled |  | 0.000 | {x:.3f} | {y:.3f} |  |"


BAD = [
    (["agent", "--mixers", "gru", "--envs", "a,,b"], "--envs lists environments like a,b,module:c, got 'a,,b'"),
    (["agent", "--mixers", "gru", "--envs", "m:A-v0,A-v0"], "each environment is compared once, got A-v0 and m:A-v0"),
    (["agent", "--mixers", "gru", "--envs", "a", "--task.env", "b"], "got --task.env b too"),
    (["agent", "--mixers", "gru", "--envs", "a", "--jobs", "0"], "--jobs must lie between 1 and 1,024, got 0"),
    (["agent_corridor", "--mixers", "gru", "--jobs", "2"], "leave out --jobs 2, or list several --envs"),
    (["recall", "--mixers", "gru", "--envs", "a"], "got the recipe recall; give agent"),
    (["agent", "--mixers", "gru", "--envs", "Nowhere-v0"], "Nowhere-v0"),
]


@pytest.mark.parametrize(("args", "said"), BAD, ids=lambda x: " ".join(x)[-40:] if isinstance(x, list) else None)
def test_bad_input_is_one_sentence(call_compare, tmp_path, args, said):
    code, _, err = call_compare(*args)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1, err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_refused(call_compare, tmp_path):
    (tmp_path / "runs" / "s").mkdir(parents=True)
    (tmp_path / "runs" / "s" / "note.txt").write_text("mine")
    code, _, err = call_compare(*words(tmp_path))
    assert code == 2 and "is no comparison of several environments" in err


def test_folders_of_environments():
    assert parse_environments("a/B-v0, m:c/D-v1") == {"a-B-v0": "a/B-v0", "c-D-v1": "m:c/D-v1"}


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_killed_then_resumed(tmp_path, monkeypatch):
    """With kill -9 of the command all its workers save and end; the same command gives what an undisturbed one gives.

    The short twin is test_systems_in_several_environments, which goes on after a failed run.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    more = ("--jobs", "2", "--train.checkpoint-every", "3")
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    start = lambda name: spawn("compare", *words(tmp_path / name, *more, steps=40))  # noqa: E731
    whole = start("whole")
    assert whole.communicate(timeout=600) and whole.returncode == 0
    process, folder = start("cut"), tmp_path / "cut" / "runs" / "s"
    first = folder / "Tiny-Echo-v0" / "expire_span-seed0" / "metrics.jsonl"
    wait_until(lambda: first.exists() and first.stat().st_size > 900, process)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_until(lambda: not child_of(str(folder)), None, seconds=120)
    assert not (folder / "table.md").exists() and not list(folder.glob("*/gru-seed0/result.json"))
    begun = time.time()
    again = start("cut")
    assert again.communicate(timeout=600) and again.returncode == 0 and time.time() > begun
    for path in (tmp_path / "whole" / "runs" / "s").rglob("*"):
        if path.name in ("metrics.jsonl", "result.json", "random.json", "table.md"):
            assert path.read_bytes() == (folder / path.relative_to(tmp_path / "whole" / "runs" / "s")).read_bytes(), (
                path
            )
