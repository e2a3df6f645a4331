"""The error boundary: whatever the disk, the memory, the files or a signal do, a user reads one sentence."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from expire_span import checkpoint, runs
from expire_span.cli import main
from expire_span.disk import files
from expire_span.errors import RunError, StorageError, UserError, explain
from expire_span.lab.compare.children import describe_end
from expire_span.models.decoder import Decoder
from expire_span.recipes import recall, text_tiny
from expire_span.runs import RunFolder, find_run
from expire_span.train import supervised
from tests.tiny import ROOT, as_options, spawn, tiny_config, write_text

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def call(capsys, monkeypatch, tmp_path):
    """Run a command inside an empty folder; returns (exit code, stderr). A traceback would end the test."""
    monkeypatch.chdir(tmp_path)

    def run(*args) -> tuple[int, str]:
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capsys.readouterr().err

    return run


def check_refused(answer: tuple[int, str], *words: str) -> None:
    code, err = answer
    assert code == 2 and err.startswith("expire-span: ") and len(err.strip().splitlines()) == 1, err
    for word in words:
        assert word in err, err


def make_run(tmp_path: Path, steps: int = 4, **settings) -> RunFolder:
    config = tiny_config(write_text(tmp_path), steps=steps, checkpoint_every=2, log_every=1, **settings)
    return supervised.train(config, tmp_path / "runs" / "a", shown=False)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (RunError("x"), "x", 1),
        (UserError("x"), "x", 2),
        (StorageError("x"), "x", 2),
        (ValueError("bad"), "bad", 2),
        (OSError(errno.ENOSPC, "No space left", "/a/b"), "/a/b: the disk is full", 2),
        (OSError(errno.ENAMETOOLONG, "File name too long", "n"), "the name is too long", 2),
        (MemoryError(), "not enough memory (MemoryError)", 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "not enough memory (CUDA out of memory. Tried)", 2),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 8 bytes"), "not enough memory", 2),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"), "try smaller sizes", 2),
        (RuntimeError("std::bad_alloc"), "not enough memory (std::bad_alloc)", 2),
        (ValueError("Maximum allowed dimension exceeded"), "not enough memory", 2),
        (SafetensorError("header too small"), "header too small", 2),
        (KeyboardInterrupt(), "stopped", 130),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, BaseException) else None,
)
def test_every_known_error_has_a_sentence(error, words, code):
    told = explain(error)
    assert told is not None and words in told[0] and told[1] == code


def test_a_fault_of_the_package_is_not_hidden():
    assert explain(RuntimeError("shapes")) is None and explain(KeyError("x")) is None


# Places that cannot hold runs


def test_places_that_cannot_hold_a_run(call, tmp_path):
    (tmp_path / "file").write_text("mine")
    check_refused(call("train", "recall", "--runs-dir", "file"), "file is a file", "--runs-dir")
    check_refused(call("train", "recall", "--runs-dir", "file/deep/er"), "file is a file")
    check_refused(call("compare", "recall", "--mixers", "gru", "--runs-dir", "file"), "file")
    check_refused(call("train", "recall", "--name", "x" * 300), "at most 200 bytes, got 300")
    check_refused(call("train", "recall", "--name", "a\nb"), "printable")
    check_refused(call("train", "recall", "--runs-dir", "y" * 300), "the name is too long")
    check_refused(call("eval", "z" * 5000), "too long")
    check_refused(call("demo", "--runs-dir", "file"), "file is a file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may write everywhere")
def test_an_unwritable_place(call, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    check_refused(call("train", "recall", "--runs-dir", "locked"), "not writable")


# A full disk


@pytest.mark.parametrize("name", ["metrics.jsonl", "speed.jsonl", "result.json"])
def test_a_full_disk_in_training_says_how_to_go_on(tmp_path, monkeypatch, name):
    """The file at which the disk is full stays whole, and the run goes on once there is room."""
    real = open

    def limited(path, mode="r", *args, **options):
        if name in str(path) and mode in ("ab", "wb"):
            raise FULL
        return real(path, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(runs if name.endswith("l") else files, "open", limited, raising=False)
        with pytest.raises(StorageError, match=rf"cannot write .*{name}: the disk is full; .*expire-span resume"):
            make_run(tmp_path)
    run = supervised.resume(RunFolder.open(tmp_path / "runs" / "a"), shown=False)
    assert run.finished and [line["step"] for line in run.read_metrics() if line["split"] == "train"] == [1, 2, 3, 4]


def test_a_full_disk_for_tensorboard(tmp_path, monkeypatch, capfd):
    """Its library writes in a thread, whose own traceback must not reach the terminal."""

    def full(*_args):
        raise FULL

    monkeypatch.setattr("tensorboard.summary.writer.record_writer.RecordWriter.write", full)
    hook = threading.excepthook
    with pytest.raises(StorageError, match=r"cannot write .*tensorboard: the disk is full; .*expire-span resume"):
        make_run(tmp_path, tracker="tensorboard")
    assert capfd.readouterr().err == "" and threading.excepthook is hook


def test_a_full_disk_in_resume_and_report(call, tmp_path, monkeypatch):
    run = make_run(tmp_path)

    def full(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise FULL

    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_synced", full)
        check_refused(call("report", "a"), "report.html: the disk is full")
        (run.path / "result.json").rename(tmp_path / "result.json")
        check_refused(call("resume", "a"), "cannot write", "the disk is full", "expire-span resume")
    (tmp_path / "result.json").rename(run.path / "result.json")
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


def test_a_full_disk_leaves_no_half_of_what_a_command_writes(call, tmp_path, monkeypatch):
    make_run(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("memories that expire " * 20)
    before = {p for p in tmp_path.rglob("*") if p.is_file()}
    commands = [
        ("trace", "a", "--text", text, "--out", "a.trace"),
        ("figure", "timeline", "a", "--out", "a.png"),
        ("analyse", "a"),
        ("data", "collision", "--frames", "400", "--to", "frames"),
    ]

    def full(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise FULL

    monkeypatch.setattr(files, "write_synced", full)
    for command in commands:
        check_refused(call(*command), "the disk is full")
        assert {p for p in tmp_path.rglob("*") if p.is_file()} == before, command

    def full_for_pictures(path, data):
        path.write_bytes(data)
        if ".png" in path.name:
            raise FULL

    monkeypatch.setattr(files, "write_synced", full_for_pictures)  # there is room for the first of several files
    check_refused(call("analyse", "a", "--out", "found"), "the disk is full")
    assert {p for p in tmp_path.rglob("*") if p.is_file()} == before and not (tmp_path / "found").exists()


def test_ctrl_c_in_eval_is_a_sentence(call, tmp_path, monkeypatch):
    run = make_run(tmp_path)
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}

    def stop(*_args, **_options):
        raise KeyboardInterrupt  # what Python does with the signal, without waiting for its delivery

    monkeypatch.setattr(Decoder, "forward", stop)
    code, err = call("eval", "a")
    assert code == 130 and err.strip() == "expire-span: stopped"
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before


# Damaged and foreign files


def test_stray_files_do_not_hide_sound_checkpoints(call, tmp_path):
    run = make_run(tmp_path)
    (run.checkpoints / "step-99999999").write_text("a file")
    (run.checkpoints / "step-latest").mkdir()
    (run.checkpoints / "notes.txt").write_text("mine")
    (run.checkpoints / "step-00000099").mkdir()
    said: list[str] = []
    assert checkpoint.newest_sound(run, said.append) == run.checkpoints / "step-00000004"
    assert len(said) == 1 and "step-00000099 is damaged (checksums.json is missing)" in said[0]
    assert call("eval", "a", "--batches", 1)[0] == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", '"x"', "[" * 100_000, "\ud800"])
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "result.json"])
def test_damaged_json_is_one_sentence(tmp_path, name, content):
    run = RunFolder.create(tmp_path / "a", recall(), recipe="recall", environment={})
    (run.path / name).write_bytes(content.encode(errors="surrogatepass") + b"\n")
    read = {"config.json": lambda: RunFolder.open(run.path), "metrics.jsonl": run.read_metrics}
    with pytest.raises(UserError) as caught:
        read.get(name, run.read_result)()
    assert name in str(caught.value) and len(str(caught.value)) < 300


def test_a_damaged_file_of_metrics_ends_commands_in_a_sentence(call, tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "a", recall(), recipe="recall", environment={})
    (run.path / "metrics.jsonl").write_bytes(files.seal_line(b'{"step": "x"}'))
    check_refused(call("report", "a"), "line 1 of", "must have a whole number as step, got 'x'")


def test_a_foreign_checkpoint_with_right_checksums(call, tmp_path):
    """Written by other hands: checksums hold, contents do not."""
    run = make_run(tmp_path)
    (run.path / "result.json").unlink()
    newest = run.checkpoints / "step-00000004"
    state = json.loads((newest / "state.json").read_text())
    cases = [
        ("state.json", b"[]"),
        ("state.json", b"{}"),
        ("state.json", json.dumps({**state, "stream": 3}).encode()),
        ("state.json", json.dumps({"step": 4}).encode()),
        ("model.safetensors", b"nonsense"),
        ("model.safetensors", (newest / "optimizer.safetensors").read_bytes()),
        ("optimizer.safetensors", (newest / "model.safetensors").read_bytes()),
    ]
    for name, data in cases:
        before = (newest / name).read_bytes()
        (newest / name).write_bytes(data)
        (newest / "checksums.json").unlink()
        checkpoint._write_sums(newest)
        whole = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
        for verb in ("resume", "eval") if name == "model.safetensors" else ("resume",):
            code, err = call(verb, "a")
            assert code in (1, 2) and len(err.strip().splitlines()) == 1, (name, data[:20], err)
        assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == whole, (name, data[:20])
        (newest / name).write_bytes(before)
    (newest / name).write_bytes(b"damaged")  # of two checkpoints, the older one does not fit: the newer is not deleted
    first = run.checkpoints / "step-00000002"
    (first / "state.json").write_text(json.dumps({**state, "step": 2, "stream": 3}))
    (first / "checksums.json").unlink()
    checkpoint._write_sums(first)
    assert call("resume", "a")[0] == 2 and newest.is_dir()
    (tmp_path / "text.txt").unlink()
    check_refused(call("resume", "a"), "which is not there; put it back")


def test_leftovers_of_killed_runs_are_swept(tmp_path):
    run = make_run(tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = [run.path / f".result.json.{dead.pid}.tmp", run.path.parent / f".a.{dead.pid}.tmp"]
    left += [run.checkpoints / ".step-00000003.tmp"]
    alive = run.path / f".report.html.{os.getpid()}.tmp"
    others = run.path.parent / f".ab.{dead.pid}.tmp"
    for path in (left[0], alive):
        path.write_text("half")
    for path in (left[1], left[2], others):
        path.mkdir()
    with run.lock():
        find_run("a", run.path.parent)
        assert all(path.exists() for path in left), "a run in training is not touched"
    find_run("a", run.path.parent)
    assert not any(path.exists() for path in left) and alive.exists() and others.exists()


# Sizes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model.dim", "1000000", "--model.heads", "10"], ["1,000,", "parameters", "GB"]),
        (["--model.layers", "1000000000"], ["model.layers must be at most 10,000, got 1,000,000,000"]),
        (["--model.layers", "9000", "--model.dim", "4096"], ["parameters", "layers 9,000", "GB"]),
        (["--model.ff-dim", "100000000000"], ["ff_dim 100,000,000,000", "smaller sizes"]),
        (["--model.ff-dim", str(10**30)], ["model.ff_dim must be smaller than"]),
        (["--train.batch", "100000000000"], ["a batch of 40,200,000,000,000 tokens"]),
        (["--train.block", "10000000000"], ["tokens"]),
        (["--model.dim", "0"], ["dim must be at least 1, got 0"]),
        (["--model.dim", "-128"], ["got -128"]),
        (["--model.ff-dim", "0"], ["ff_dim must be at least 1, got 0"]),
        (["--train.final-lr", "-5"], ["final_lr must lie in [0, 1]", "-5"]),
        (["--train.lr", "nan"], ["lr"]),
        (["--train.lr", "inf"], ["train.lr must be a finite number, got inf"]),
        (["--train.budget.live", "inf"], ["train.budget.live must be a finite number"]),
        (["--model.rotary-base", "nan"], ["rotary_base"]),
        (["--seed", "-1"], ["seed must lie between"]),
    ],
    ids=lambda x: " ".join(x)[:40],
)
def test_sizes_that_cannot_train_are_refused_with_numbers(call, tmp_path, options, words):
    check_refused(call("train", "recall", "--train.device", "cpu", *options), *words)
    assert list(tmp_path.iterdir()) == []


# Signals and processes


def test_ctrl_c_while_modules_are_loading(tmp_path):
    """A slow import stands for a slow disk: the signal comes while the command line is still being loaded."""
    (tmp_path / "tyro.py").write_text("import time\nopen('loading', 'w').close()\ntime.sleep(30)\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    process = spawn("recipes", cwd=tmp_path, env=env)
    deadline = time.monotonic() + 30
    while not (tmp_path / "loading").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err.strip() == "expire-span: stopped" and not out, err


def test_how_a_worker_ended_is_told():
    assert describe_end(-9) == "its process was killed by SIGKILL, as the system does when memory runs out"
    assert describe_end(-11) == "its process was killed by SIGSEGV" and describe_end(3).endswith("code 3")


def test_a_limit_on_the_size_of_files_is_told(call, tmp_path):
    """A real failing write: files of more than 30 kB cannot be written."""
    options = as_options(tiny_config(write_text(tmp_path), steps=4), text_tiny())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, before[1]))
    try:
        code, err = call("train", "text_tiny", *options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 2 and "cannot write the checkpoint of step 4" in err, err
    assert "Traceback" not in err and not list((tmp_path / "runs/text_tiny/checkpoints").iterdir())
