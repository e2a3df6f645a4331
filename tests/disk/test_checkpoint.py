"""Checkpoints: what goes in comes out, damage is found and named, a failed write leaves the last good one."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from expire_span import checkpoint
from expire_span.checkpoint import Snapshot
from expire_span.models.decoder import Decoder
from expire_span.models.state import pack
from expire_span.runs import RunError, RunFolder, UserError
from tests.tiny import tiny_config, write_text


@pytest.fixture
def run(tmp_path) -> RunFolder:
    config = tiny_config(write_text(tmp_path))
    return RunFolder.create(tmp_path / "runs" / "a", config, recipe="text", environment={})


def snapshot(run: RunFolder, step: int) -> Snapshot:
    torch.manual_seed(step)
    decoder = Decoder(run.config.model).train()
    _, state, _ = decoder(torch.randint(256, (3, 20)))
    optimizer = {
        "state": {"head.weight": {"exp_avg": torch.randn(4), "step": torch.tensor(3.0)}},
        "groups": [{"lr": 0.1}],
    }
    worker = {"states": [state, None], "window": {"rows": None, "counts": [1, 2]}, "bits": torch.get_rng_state()}
    return Snapshot(step, {"stream": {"starts": [1, 2]}}, worker, decoder.state_dict(), optimizer)


def save(run: RunFolder, *steps: int, keep: int = 9) -> None:
    for step in steps:
        checkpoint.save(run, snapshot(run, step), keep=keep)


def same_tree(a, b) -> bool:
    (tensors_a, skeleton_a), (tensors_b, skeleton_b) = pack(a), pack(b)
    return skeleton_a == skeleton_b and all(torch.equal(x, tensors_b[name]) for name, x in tensors_a.items())


def test_round_trip(run):
    save(run, 7)
    loaded, expected = checkpoint.load(run), snapshot(run, 7)
    assert loaded is not None and loaded.step == 7 and loaded.state["stream"] == {"starts": [1, 2]}
    assert same_tree(loaded.model, expected.model) and same_tree(loaded.optimizer, expected.optimizer)
    assert same_tree(loaded.worker, expected.worker)


def test_load_model_gives_the_weights_in_eval_mode(run):
    save(run, 3, 7)
    decoder, config = checkpoint.load_model(run)
    assert not decoder.training and config == run.config
    assert same_tree(decoder.state_dict(), snapshot(run, 7).model)


def test_no_checkpoint(run):
    assert checkpoint.load(run) is None
    with pytest.raises(UserError, match="has no checkpoint yet"):
        checkpoint.load_model(run)


def test_keeps_the_newest(run):
    save(run, 1, 2, 3, 4, keep=2)
    assert [p.name for p in checkpoint.list_checkpoints(run)] == ["step-00000004", "step-00000003"]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "memory.safetensors", "state.json"])
@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: b"", None, os.mkfifo])
def test_damage_is_named_and_the_previous_one_used(run, name, damage):
    save(run, 5, 9)
    path = checkpoint.folder_of(run, 9) / name
    if damage in (None, os.mkfifo):
        path.unlink()
    if damage is os.mkfifo:
        os.mkfifo(path)  # opening it would wait for ever
    elif damage is not None:
        path.write_bytes(damage(path.read_bytes()))
    said: list[str] = []
    loaded = checkpoint.load(run, warn=said.append)
    assert loaded is not None and loaded.step == 5
    assert len(said) == 1 and name in said[0] and "step-00000009" in said[0]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model.safetensors": 3}'])
def test_damaged_checksums_are_damage(run, content):
    save(run, 5, 9)
    (checkpoint.folder_of(run, 9) / "checksums.json").write_text(content)
    loaded = checkpoint.load(run)
    assert loaded is not None and loaded.step == 5


def test_all_damaged_is_an_error_that_says_so(run):
    save(run, 5)
    (checkpoint.folder_of(run, 5) / "state.json").write_text("{}")
    said: list[str] = []
    with pytest.raises(
        RunError, match=r"no checkpoint .* is intact \(1 tried; of step-00000005, state.json does not match"
    ):
        checkpoint.load(run, warn=said.append)
    assert not said, "there is none before it that could be tried"


def test_damaged_ones_are_removed_and_written_again(run):
    save(run, 5, 9)
    (checkpoint.folder_of(run, 9) / "state.json").write_text("{}")
    checkpoint.remove_damaged(run)
    save(run, 9)
    assert checkpoint.newest_sound(run) == checkpoint.folder_of(run, 9)


@pytest.mark.parametrize("fail_at", range(5))
def test_full_disk_leaves_the_last_good_one(run, monkeypatch, fail_at):
    save(run, 5)
    before = {p: p.read_bytes() for p in run.checkpoints.rglob("*") if p.is_file()}
    real, calls = checkpoint.write_synced, []

    def write(path, data):
        calls.append(path)
        if len(calls) > fail_at:
            real(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    monkeypatch.setattr(checkpoint, "write_synced", write)
    with pytest.raises(RunError, match=r"step 9: the disk is full; the last checkpoint is .*step-00000005.*resume"):
        save(run, 9)
    assert {p: p.read_bytes() for p in run.checkpoints.rglob("*") if p.is_file()} == before


def test_non_finite_weights_are_never_written(run):
    save(run, 5)
    bad = snapshot(run, 9)
    bad.model["head.weight"][0, 0] = float("nan")
    with pytest.raises(RunError, match=r"head.weight is not finite at step 9"):
        checkpoint.save(run, bad, keep=2)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000005"]


def test_what_a_killed_process_left_is_cleared(run):
    (run.checkpoints / ".step-00000004.tmp").mkdir()
    save(run, 5)
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000005"]


def test_files_cannot_hold_code(run):
    save(run, 5)
    names = sorted(p.name for p in checkpoint.folder_of(run, 5).iterdir())
    assert all(name.endswith((".safetensors", ".json")) for name in names)
    json.loads((checkpoint.folder_of(run, 5) / "state.json").read_text())
