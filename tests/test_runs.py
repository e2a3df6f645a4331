"""The run folder: made at once or not at all, never overwritten, readable after a crash."""

from __future__ import annotations

import errno
import json
import os

import pytest

from expire_span import runs
from expire_span.config import FORMAT_VERSION
from expire_span.recipes import recall
from expire_span.runs import RunError, RunFolder, UserError, find_run, write_atomic


def make(path):
    return RunFolder.create(path, recall(), recipe="recall", environment={"impl": "chunked"})


def test_create_and_open_round_trip(tmp_path):
    run = make(tmp_path / "deep" / "a")
    assert run == RunFolder.open(run.path)
    assert (run.config, run.recipe, run.environment) == (recall(), "recall", {"impl": "chunked"})
    head = json.loads((run.path / "config.json").read_text())
    assert head["format"] == FORMAT_VERSION and head["version"]
    assert [p.name for p in run.path.parent.iterdir()] == ["a"]


def test_existing_folder_is_never_overwritten(tmp_path):
    run = make(tmp_path / "a")
    before = (run.path / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"already exists.*--name.*resume"):
        make(tmp_path / "a")
    assert (run.path / "config.json").read_bytes() == before


@pytest.mark.parametrize("name", ["", ".hidden", ".."])
def test_odd_names_are_refused(tmp_path, name):
    with pytest.raises(UserError, match="run name"):
        runs.check_name(name)


def test_failed_creation_leaves_nothing(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runs, "write_synced", full)
    with pytest.raises(RunError, match="disk is full"):
        make(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_other_format_and_broken_config_are_refused(tmp_path):
    run = make(tmp_path / "a")
    head = json.loads((run.path / "config.json").read_text())
    (run.path / "config.json").write_text(json.dumps({**head, "format": 99}))
    with pytest.raises(UserError, match=f"format 99 .*reads formats 1 to {FORMAT_VERSION}"):
        RunFolder.open(run.path)
    (run.path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        RunFolder.open(run.path)


def test_find_by_name_or_path_and_suggest(tmp_path):
    run = make(tmp_path / "corridor")
    assert find_run("corridor", tmp_path) == run
    assert find_run(str(run.path), tmp_path / "elsewhere").path == run.path
    with pytest.raises(UserError, match="did you mean corridor"):
        find_run("coridor", tmp_path)


def test_truncate_drops_later_and_broken_lines(tmp_path):
    run = make(tmp_path / "a")
    for step in (10, 20, 30):
        run.append_metrics({"step": step, "split": "train", "loss": 1 / step})
    with open(run.path / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 40, "spl')
    assert [line["step"] for line in run.read_metrics()] == [10, 20, 30]
    run.truncate(20)
    assert [line["step"] for line in run.read_metrics()] == [10, 20]
    assert (run.path / "metrics.jsonl").read_bytes().endswith(b"\n")


def test_atomic_write_keeps_the_old_file_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    write_atomic(path, b"old")

    def fail(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_result_marks_the_run_finished(tmp_path):
    run = make(tmp_path / "a")
    assert not run.finished and run.read_result() is None
    run.write_result({"loss": 1.5})
    assert run.finished and run.read_result() == {"loss": 1.5}
