"""Interruptions: after kill -9, damage, Ctrl-C or a full disk, the finished run's metrics equal an unbroken run's."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from expire_span import checkpoint
from expire_span.recipes import text_tiny
from expire_span.runs import RunError, RunFolder, UserError, find_run
from expire_span.train.signals import Interrupted
from expire_span.train.supervised import SupervisedLearner, resume, train
from tests.forked import Forked
from tests.tiny import as_options, noisy_config, tiny_config, write_text

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path):
    return noisy_config(write_text(tmp_path), steps=12, checkpoint_every=3, eval_every=4, log_every=2, eval_batches=1)


def finished(run: RunFolder) -> tuple[bytes, bytes]:
    return (run.path / "metrics.jsonl").read_bytes(), (run.path / "result.json").read_bytes()


def start(config, tmp_path: Path, name: str) -> Forked:
    args = ["train", "text_tiny", "--runs-dir", str(tmp_path / "runs"), "--name", name]
    return Forked(*args, *as_options(config, text_tiny()))


def wait_for_lines(path: Path, count: int, process) -> None:
    """Wait until the run has written `count` lines of metrics."""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("moments", [(4,), pytest.param((1, 2, 4, 6), marks=pytest.mark.long)], ids=str)
def test_kill_9_at_random_moments(config, tmp_path, moments):
    unbroken = train(config, tmp_path / "runs" / "unbroken", recipe="text_tiny", shown=False)
    draw = random.Random(os.getpid())
    process = start(config, tmp_path, "killed")
    path = tmp_path / "runs" / "killed" / "metrics.jsonl"
    for number, lines in enumerate(moments):
        if number:
            process = Forked("resume", "killed", "--runs-dir", str(tmp_path / "runs"))
        wait_for_lines(path, lines, process)
        time.sleep(draw.random() * 0.2)
        process.kill()
        process.communicate()
    killed = find_run("killed", tmp_path / "runs")
    if not killed.finished:  # the signal can come after the last step
        killed = resume(killed, shown=False)
    assert finished(killed) == finished(unbroken)
    assert not list(tmp_path.glob("runs/killed/checkpoints/.*"))


class Crash(BaseException):
    """Stands for a power cut inside this process."""


@pytest.mark.parametrize("stop_after", [7, 12, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 11))])
def test_a_crash_after_any_step_changes_nothing(config, tmp_path, monkeypatch, stop_after):
    unbroken = _unbroken(config, tmp_path)
    real = SupervisedLearner.step

    def step(self, index):
        if index == stop_after:
            raise Crash
        return real(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLearner, "step", step)
        if stop_after == 12:
            patch.setattr(SupervisedLearner, "final_result", lambda self: (_ for _ in ()).throw(Crash))
        with pytest.raises(Crash):
            train(config, tmp_path / "a", shown=False)
    run = resume(RunFolder.open(tmp_path / "a"), shown=False)
    assert finished(run) == unbroken


_cache: dict[str, tuple[bytes, bytes]] = {}


def _unbroken(config, tmp_path) -> tuple[bytes, bytes]:
    """The same settings over the same text, trained once for all cases."""
    if "run" not in _cache:
        _cache["run"] = finished(train(config, tmp_path / "unbroken", shown=False))
    return _cache["run"]


def stop_at(monkeypatch, at: int) -> None:
    """Make training crash before step `at` of this test."""
    real = SupervisedLearner.step

    def step(self, index):
        if index == at:
            raise Crash
        return real(self, index)

    monkeypatch.setattr(SupervisedLearner, "step", step)


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_newest_checkpoint_is_replaced_by_the_one_before(config, tmp_path, monkeypatch, capsys, damage):
    unbroken = _unbroken(config, tmp_path)
    with monkeypatch.context() as patch, pytest.raises(Crash):
        stop_at(patch, 8)
        train(config, tmp_path / "a", shown=False)
    path = tmp_path / "a" / "checkpoints" / "step-00000006" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data) if damage == "flip" else bytes(data[:-100]))
    run = resume(RunFolder.open(tmp_path / "a"))
    said = capsys.readouterr().out
    assert "step-00000006 is damaged (model.safetensors does not match its checksum)" in said
    assert finished(run) == unbroken


def test_ctrl_c_saves_and_exits_cleanly(config, tmp_path):
    process = start(config, tmp_path, "asked")
    wait_for_lines(tmp_path / "runs" / "asked" / "metrics.jsonl", 1, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1
    assert "expire-span resume" in err and "saved" in err
    run = resume(find_run("asked", tmp_path / "runs"), shown=False)
    assert finished(run) == _unbroken(config, tmp_path)


def test_full_disk_then_resume(config, tmp_path, monkeypatch):
    real, calls = checkpoint.write_synced, []

    def write(path, data):
        calls.append(path)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_synced", write)
        with pytest.raises(RunError, match=r"step 9: the disk is full; the last checkpoint is .*step-00000006"):
            train(config, tmp_path / "a", shown=False)
    run = resume(RunFolder.open(tmp_path / "a"), shown=False)
    assert finished(run) == _unbroken(config, tmp_path)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_in_this_process_is_answered_between_steps(tmp_path, monkeypatch, signum, code):
    config = tiny_config(write_text(tmp_path), steps=30, checkpoint_every=100)
    real = SupervisedLearner.step

    def step(self, index):
        if index == 6:
            os.kill(os.getpid(), signum)
        return real(self, index)

    handler = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        patch.setattr(SupervisedLearner, "step", step)
        with pytest.raises(Interrupted, match="stopped at step 7 of 30 and saved") as caught:
            train(config, tmp_path / "a", shown=False)
    assert caught.value.exit_code == code and signal.getsignal(signum) is handler
    assert [p.name for p in (tmp_path / "a" / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_signal_while_a_checkpoint_is_written_waits_for_it(config, tmp_path, monkeypatch):
    real, calls = checkpoint.write_synced, []

    def write(path, data):
        calls.append(path)
        if len(calls) == 2:  # in the middle of the first checkpoint
            os.kill(os.getpid(), signal.SIGINT)
        real(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_synced", write)
        with pytest.raises(Interrupted, match="and saved"):
            train(config, tmp_path / "a", shown=False)
    folder = tmp_path / "a" / "checkpoints"
    assert folder.is_dir() and not [p for p in folder.iterdir() if p.name.startswith(".")]
    run = resume(RunFolder.open(tmp_path / "a"), shown=False)
    assert finished(run) == _unbroken(config, tmp_path)


class Killed(BaseException):
    """Stands for a kill -9: nothing of this process's own is cleaned up."""


def names(run: RunFolder) -> list[str]:
    return sorted(str(path.relative_to(run.path)) for path in run.path.rglob("*") if "events.out" not in path.name)


@pytest.mark.parametrize("moment", ["before", "within"])
def test_a_kill_around_the_last_pruning_leaves_nothing_behind(tmp_path, monkeypatch, moment):
    """The last checkpoint has its name already, and the oldest is still there, whole or in part."""
    config = tiny_config(write_text(tmp_path), steps=3, checkpoint_every=1, keep_checkpoints=2)
    unbroken = train(config, tmp_path / "whole", shown=False)
    real = checkpoint.prune

    def prune(run, keep):
        if checkpoint.list_checkpoints(run)[0].name != "step-00000003":
            return real(run, keep)
        if moment == "within":
            (checkpoint.list_checkpoints(run)[-1] / "model.safetensors").unlink()
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "prune", prune)
        with pytest.raises(Killed):
            train(config, tmp_path / "a", shown=False)
    killed = RunFolder.open(tmp_path / "a")
    for folder in (killed.path, killed.path / "adapter"):
        folder.mkdir(exist_ok=True)
        (folder / ".adapter.safetensors.99999999.tmp").touch()
    run = resume(killed, shown=False)
    (run.path / "adapter").rmdir()
    assert finished(run) == finished(unbroken) and names(run) == names(unbroken)


def test_finished_run_is_not_resumed(tmp_path):
    run = train(tiny_config(write_text(tmp_path), steps=2), tmp_path / "a", shown=False)
    with pytest.raises(UserError, match="is finished"):
        resume(run)


def test_a_run_in_training_cannot_be_resumed_beside_it(config, tmp_path):
    process = start(replace(config, train=replace(config.train, steps=100_000)), tmp_path, "busy")
    path = tmp_path / "runs" / "busy"
    wait_for_lines(path / "metrics.jsonl", 1, process)
    before = (path / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="is being trained by another process"):
        resume(RunFolder.open(path), shown=False)
    assert process.poll() is None and (path / "metrics.jsonl").read_bytes().startswith(before)
    process.kill()
    process.communicate()
    with RunFolder.open(path).lock():  # what a killed process held is free
        pass
