"""The benchmark that compares two trees finds a changed number, names what it cannot compare, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import same_losses
from tests.tiny import ROOT

STEP = {"step": 1, "loss": 0.5, "checksum": "a"}


def write(*lines: dict[str, object]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ([{**STEP, "checksum": "b"}], None),
        ([{**STEP, "kept": 3}], None),
        ([{**STEP, "loss": 0.5000001}], "step 1, loss: 0.5 before, 0.5000001 after"),
        ([STEP, STEP], "1 lines before, 2 after"),
        ([{"step": 1, "perplexity": 2.0}], "step 1: no value is in both"),
        ([], "1 lines before, 0 after"),
    ],
)
def test_only_values_that_both_have_are_compared(after: list[dict[str, object]], said: str | None) -> None:
    assert same_losses.find_difference(write(STEP), write(*after)) == said


def test_two_empty_files_are_no_agreement_and_nan_equals_nan() -> None:
    assert same_losses.find_difference(b"", b"") == "no line on either side"
    assert same_losses.compare_metrics({}, {}) == (False, ["DIFFERENT: neither side has metrics"])
    line = write({"step": 1, "loss": float("nan")})
    assert same_losses.find_difference(line, line) is None


def test_fields_of_one_side_are_named() -> None:
    before, after = write({"step": 1, "loss": 0.5, "old": 1}), write(STEP)
    same, lines = same_losses.compare_metrics({"metrics.jsonl": before}, {"metrics.jsonl": after})
    assert same
    assert lines == ["metrics.jsonl: the same; only before: old; only after: checksum"]


FAKE = """
import sys, time
from pathlib import Path
args = sys.argv[1:]
Path("started").touch()
time.sleep(100 if "recall" in args and PAUSE else 0)
if "words" in args:
    sys.exit("words are refused")
out = Path(args[args.index("--out" if "--out" in args else "--runs-dir") + 1])
out.mkdir(parents=True)
loss = 0.5 if "entrances" in args else 0.25
(out / "metrics.jsonl").write_text('{"step": 1, "loss": %s}' % loss)
"""


def write_tree(folder: Path, source: str) -> str:
    """A tree with a package that writes one line of metrics for each run, and refuses `words`."""
    (folder / "expire_span").mkdir(parents=True)
    (folder / "expire_span/__main__.py").write_text(source)
    return str(folder)


def test_every_run_is_reported_though_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_losses, "write_model", lambda folder: folder)
    source = FAKE.replace("PAUSE", "False")
    before = write_tree(tmp_path / "before", source)
    after = write_tree(tmp_path / "after", source.replace("0.5", "0.6"))
    assert same_losses.main([before, after]) == 1
    said = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    failed = [["words", f"FAILED {side} ended with code 1: words are refused"] for side in ("before", "after")]
    changed = ["entrances", "metrics.jsonl: DIFFERENT at step 1, loss: 0.5 before, 0.6 after"]
    same = {run: [[run, "metrics.jsonl: the same"]] for run in same_losses.RUNS}
    same["retrofit"] = [["retrofit", "retrofit/metrics.jsonl: the same"]]
    outcomes = {**same, "words": failed, "entrances": [changed]}
    assert said == [line for run in same_losses.RUNS for line in outcomes[run]]


def test_an_interrupted_comparison_leaves_no_folder_and_no_training(tmp_path: Path) -> None:
    tree, room = write_tree(tmp_path / "tree", FAKE.replace("PAUSE", "True")), tmp_path / "room"
    room.mkdir()
    env = {**os.environ, "TMPDIR": str(room), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.same_losses", tree, tree, "--only", "recall"]
    comparison = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list(room.rglob("started"))) == 2)
        comparison.terminate()
        assert "interrupted" in comparison.communicate(timeout=60)[1]
    finally:
        comparison.kill()
    assert comparison.returncode == 1
    assert not list(room.iterdir())


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


FASTER = """
_rate_before = rate_factor


def rate_factor(*args, **options):
    return 1.001 * _rate_before(*args, **options)
"""


@pytest.mark.slow
def test_a_tree_equals_itself_and_a_changed_loss_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_losses, "STEPS", 3)
    shutil.copytree(ROOT / "expire_span", tmp_path / "expire_span")
    assert same_losses.main([str(ROOT), str(tmp_path), "--only", "words"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("metrics.jsonl: the same")
    with (tmp_path / "expire_span/train/optimizers.py").open("a") as file:
        file.write(FASTER)
    assert same_losses.main([str(ROOT), str(tmp_path), "--only", "words"]) == 1
    assert "DIFFERENT at step " in capsys.readouterr().out
