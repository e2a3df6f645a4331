"""What a run depends on is verified when it is read: config.json, types and words of every field, the data; old formats."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from expire_span.disk.files import seal
from expire_span.recipes import recall
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import DecoderConfig, RunConfig, TrainConfig, from_dict, to_dict
from expire_span.train import data_fingerprint as fingerprint
from expire_span.train.supervised import SupervisedLearner, resume, train
from tests.tiny import tiny_config, write_text


def test_every_flipped_byte_of_the_config_is_found(tmp_path):
    """Only the layout may differ: a flipped bit in any name or value is refused, in one sentence."""
    run = RunFolder.create(tmp_path / "a", recall(), recipe="recall", environment={})
    file = run.path / "config.json"
    data = file.read_bytes()
    for place in range(0, len(data), 7):
        if not data[place : place + 1].isspace():
            file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
            with pytest.raises(UserError) as caught:
                RunFolder.open(run.path)
            assert "config.json" in str(caught.value) or "has format" in str(caught.value)
    file.write_bytes(data)
    assert RunFolder.open(run.path) == run


def test_a_changed_digit_says_what_to_do(tmp_path):
    run = RunFolder.create(tmp_path / "a", recall(), recipe="recall", environment={})
    file = run.path / "config.json"
    file.write_text(file.read_text().replace('"lr": 0.005', '"lr": 0.006'))
    with pytest.raises(UserError, match=r"config\.json does not match its checksum.*restore it"):
        RunFolder.open(run.path)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("train.steps", "300", "train.steps must be a whole number, got '300'"),
        ("train.steps", 3.5, "train.steps must be a whole number, got 3.5"),
        ("train.steps", True, "train.steps must be a whole number, got True"),
        ("train.carry", 1, "train.carry must be true or false, got 1"),
        ("train.lr", "0.1", "train.lr must be a finite number, got '0.1'"),
        ("train.lr", float("nan"), "train.lr must be a finite number, got nan"),
        ("train.clip", float("inf"), "train.clip must be a finite number, got inf"),
        ("train.schedule", "odd", "train.schedule must be one of cosine, constant, linear, got 'odd'"),
        ("train.betas", [0.9], "train.betas must have 2 values, got 1"),
        ("train.betas", [0.9, "x"], r"train.betas\[1\] must be a finite number, got 'x'"),
        ("train.budget", 3, "train.budget must be a table of fields, got 3"),
        ("train.budget.live", [], r"train.budget.live must be a finite number, got \[\]"),
        ("model.mixer", None, "model.mixer must be a table of fields, got None"),
        ("model.mixer.kind", ["expire_span"], r"unknown kind \['expire_span'\] of model.mixer"),
        ("model.norm", 0, "model.norm must be one of pre, post, got 0"),
        ("task.kind", "chess", "unknown kind 'chess' of task"),
        ("train.device", 7, "train.device must be text, got 7"),
        ("train.stepz", 7, "train has no field stepz; did you mean steps"),
        ("seed", -1, "seed must lie between 0"),
    ],
)
def test_types_and_words_are_checked(place, value, words):
    data = json.loads(json.dumps(to_dict(recall())))
    inner = data
    *path, last = place.split(".")
    for name in path:
        inner = inner[name]
    inner[last] = value
    with pytest.raises(ValueError, match=words):
        from_dict(RunConfig, data)


def test_missing_fields_and_whole_numbers_for_numbers():
    with pytest.raises(ValueError, match="RunConfig lacks the field task"):
        from_dict(RunConfig, {})
    with pytest.raises(ValueError, match=r"RunConfig must be a table of fields, got \[\]"):
        from_dict(RunConfig, [])
    assert from_dict(TrainConfig, {"lr": 1}).lr == 1


@pytest.mark.parametrize("head", [{"config": 3}, {"config": {}}, {"recipe": 3}, {"environment": []}])
def test_a_foreign_config_with_a_right_checksum_is_refused(tmp_path, head):
    run = RunFolder.create(tmp_path / "a", recall(), recipe="recall", environment={})
    told = json.loads((run.path / "config.json").read_text())
    told.pop("checksum")
    (run.path / "config.json").write_text(json.dumps(seal({**told, **head})))
    with pytest.raises(UserError, match=r"config\.json: "):
        RunFolder.open(run.path)


@pytest.mark.parametrize(
    "build",
    [
        lambda: replace(recall(), model=replace(recall().model, dim=0, heads=1)),
        lambda: replace(recall(), model=replace(recall().model, ff_dim=-8)),
        lambda: replace(recall(), train=replace(recall().train, final_lr=-5)),
        lambda: replace(recall(), train=replace(recall().train, betas=(0.9, 1.0))),
        lambda: replace(recall(), train=replace(recall().train, lr=float("nan"))),
        lambda: replace(recall(), train=replace(recall().train, lr=float("inf"))),
        lambda: replace(recall(), train=replace(recall().train, batch=2**60)),
        lambda: replace(recall(), seed=-3),
        lambda: replace(recall(), model=DecoderConfig(rotary_base=float("inf"))),
    ],
)
def test_values_that_can_never_train_are_refused(build):
    with pytest.raises(ValueError, match="must"):
        build()


# The data


def interrupted(tmp_path: Path, monkeypatch, text: Path) -> RunFolder:
    """A run that ended before its fourth step."""
    real = SupervisedLearner.step
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SupervisedLearner, "step", lambda self, n: real(self, n) if n < 3 else _stop())
        train(tiny_config(text, steps=5, checkpoint_every=2), tmp_path / "run", shown=False)
    return RunFolder.open(tmp_path / "run")


def _stop():
    raise KeyboardInterrupt


def test_changed_data_is_refused_unless_it_is_meant(tmp_path, monkeypatch):
    text = write_text(tmp_path)
    run = interrupted(tmp_path, monkeypatch, text)
    assert run.data["bytes"] == 3000 and len(run.data["sha256"]) == 64
    before = {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()}
    text.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(UserError, match=r"data of run .* has changed since it began.*--allow-changed-data"):
        resume(run, shown=False)
    assert {p: p.read_bytes() for p in run.path.rglob("*") if p.is_file()} == before
    assert resume(run, allow_changed_data=True, shown=False).finished


def test_a_fingerprint_sees_names_sizes_and_bytes(tmp_path, monkeypatch):
    def find(path):
        return fingerprint.find_fingerprint(None, replace(tiny_config(path).task, path=str(path)))["sha256"]

    (tmp_path / "f").mkdir()
    (tmp_path / "f/a").write_bytes(b"one")
    (tmp_path / "f/b").write_bytes(b"two")
    seen = {find(tmp_path / "f")}
    for name, data in (("b", b"twO"), ("a", b"onet"), ("c", b"")):
        (tmp_path / "f" / name).write_bytes(data)
        seen.add(find(tmp_path / "f"))
    (tmp_path / "f/a").rename(tmp_path / "f/d")
    seen.add(find(tmp_path / "f"))
    assert len(seen) == 5
    monkeypatch.setattr(fingerprint, "WHOLE", 100)  # a large file: its ends and pieces between them are read
    monkeypatch.setattr(fingerprint, "PIECE", 16)
    monkeypatch.setattr(fingerprint, "PIECES", 4)
    large = tmp_path / "large"
    for place in (0, 1000, 1007, 333):
        data = bytearray(1008)
        data[place] = 1
        large.write_bytes(data)
        seen.add(find(large))
    assert len(seen) == 9
    assert fingerprint.find_fingerprint(None, recall().task) == {}
