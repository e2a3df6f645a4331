"""The run folder: made at once or not at all, never overwritten, readable after a crash."""

from __future__ import annotations

import errno
import json
import os

import pytest

from expire_span import checkpoint, runs
from expire_span.disk.files import seal, seal_line, to_json, write_together
from expire_span.disk.records import MEASURED
from expire_span.recipes import recall
from expire_span.runs import RunError, RunFolder, StorageError, UserError, find_run, write_atomic
from expire_span.settings.run import FORMAT_VERSION
from expire_span.shipped import SHIPPED


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
    with pytest.raises(UserError, match=f"format 99 .*reads format {FORMAT_VERSION}"):
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
    write_atomic(path, b"older")
    with open(path, "rb") as reader:  # who has begun to read goes on with what was there
        write_atomic(path, b"old")
        assert reader.read() == b"older" and path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]

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


SPEED = {"step": 1, "seconds": 1.0, "tokens_per_second": 1.0, "ms_per_step": 1.0, "peak_bytes": 1}


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("metrics.jsonl", {"step": True}, "line 1 of .* must have a whole number as step, got True"),
        ("metrics.jsonl", {"step": -1}, "a whole number as step, got -1"),
        ("metrics.jsonl", {"step": 1, "live": "x"}, "a list of numbers, one for each layer as live, got 'x'"),
        ("metrics.jsonl", {"step": 1, "live": [None]}, r"as live, got \[None\]"),
        ("metrics.jsonl", {"step": 1, "loss": "0.5"}, "a number or null as loss, got '0.5'"),
        ("metrics.jsonl", {"step": 1, "loss": 10**300}, "a number or null as loss, got 10000"),
        ("metrics.jsonl", {"step": 1, "split": 3}, "text as split, got 3"),
        ("speed.jsonl", {"step": 1}, "a number as seconds, got None"),
        ("speed.jsonl", SPEED | {"peak_bytes": None}, "a number as peak_bytes, got None"),
        ("result.json", {"score": None}, "result.json must have a number as score, got None"),
        ("result.json", {"rows": "2"}, "a whole number as rows, got '2'"),
        ("result.json", dict.fromkeys(MEASURED, 1) | {"live": [1], "peak_live": [1], "bands": [{}]}, "bands as bands"),
        ("result.json", {"loss": 1.5}, "result.json must have a whole number as rows, got None"),
    ],
)
def test_fields_of_another_type_are_named(tmp_path, name, record, words):
    run = make(tmp_path / "a")
    line = seal_line(json.dumps(record).encode())
    (run.path / name).write_bytes(to_json(seal(record)) if name == "result.json" else line)
    read = {"metrics.jsonl": run.read_metrics, "speed.jsonl": run.read_speed}
    with pytest.raises(UserError, match=words):
        read.get(name, lambda: run.read_result(*MEASURED))()


def test_neither_file_of_metrics_is_cut_where_one_is_damaged(tmp_path):
    run = make(tmp_path / "a")
    run.append_metrics({"step": 10})
    run.append_speed({"step": 10})
    with pytest.raises(UserError, match=r"line 1 of .*speed.jsonl"):
        run.truncate(0)
    assert run.read_metrics() == [{"step": 10}]


DEAD = 99_999_999
"""A number that no process has."""


def test_leftovers_of_killed_processes_are_deleted_and_those_behind_links_are_not(tmp_path):
    """A folder from elsewhere may hold links to places that are none of its own."""
    run = make(tmp_path / "runs" / "a")
    elsewhere = make(tmp_path / "other" / "b")
    left = [
        f".metrics.jsonl.{DEAD}.tmp",
        f"adapter/.adapter.safetensors.{DEAD}.tmp",
        "checkpoints/.step-00000003.tmp/x",
    ]
    for folder in (run, elsewhere):
        for name in left:
            (folder.path / name).parent.mkdir(exist_ok=True)
            (folder.path / name).touch()
    find_run("a", tmp_path / "runs")
    assert sorted(x.name for x in run.path.rglob("*")) == ["adapter", "checkpoints", "config.json"]
    for part in ("adapter", "checkpoints"):
        (run.path / part).rmdir()
        (run.path / part).symlink_to(elsewhere.path / part)
    find_run("a", tmp_path / "runs").remove_unfinished()
    assert all((elsewhere.path / name).exists() for name in left)


def test_what_is_written_about_the_shipped_model_is_not_written_into_the_package(tmp_path):
    assert RunFolder.open(SHIPPED).is_shipped and find_run(SHIPPED.name, tmp_path).is_shipped
    (tmp_path / "link").symlink_to(SHIPPED)
    assert find_run("link", tmp_path).is_shipped
    assert not make(tmp_path / "a").is_shipped


def test_training_behind_a_link_is_refused(tmp_path):
    from expire_span.train import session

    run = make(tmp_path / "a")
    run.checkpoints.rename(tmp_path / "disk")
    run.checkpoints.symlink_to(tmp_path / "disk")
    assert checkpoint.list_checkpoints(run) == []
    with pytest.raises(
        UserError, match=r"checkpoints is a link to .*disk, .*; put that folder in the place of the link"
    ):
        session.go_on(lambda config: pytest.fail("it was built"), run)


def test_a_file_that_is_written_again_leaves_no_part_of_an_earlier_try(tmp_path):
    for name in ("one.json", "two[1].json"):
        (tmp_path / f".{name}.{DEAD}.tmp").touch()
    (tmp_path / f".other.json.{DEAD}.tmp").touch()
    write_atomic(tmp_path / "one.json", b"1")
    write_together(tmp_path, {"two[1].json": b"2"})
    assert sorted(x.name for x in tmp_path.iterdir()) == [f".other.json.{DEAD}.tmp", "one.json", "two[1].json"]


def test_pipes_links_and_folders_in_place_of_files(tmp_path):
    """A pipe would be waited for without end; a link to itself is no file, and is not a missing one either."""
    run = make(tmp_path / "a")
    os.mkfifo(run.path / "metrics.jsonl")
    with pytest.raises(OSError, match="not a plain file"):
        run.read_metrics()
    (run.path / "speed.jsonl").symlink_to("speed.jsonl")
    with pytest.raises(OSError, match="symbolic links"):
        run.read_speed()
    run.checkpoints.rmdir()
    run.checkpoints.touch()
    with pytest.raises(StorageError, match="checkpoints must be a folder, and is none"):
        checkpoint.list_checkpoints(run)
