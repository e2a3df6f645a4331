"""Flipped bits in what a run writes are found when it is read: metrics, speed, result and traces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from expire_span.disk.files import check_line, seal_line
from expire_span.errors import UserError
from expire_span.recipes import recall
from expire_span.runs import RunFolder
from expire_span.view.trace import Trace, encode, read_lines
from tests.stream_cases import build
from tests.view.test_trace import trace_of

LINE = {"step": 10, "split": "train", "loss": 0.75, "live": [3.5, 4.0], "score": float("nan")}
SPEED = {"step": 10, "seconds": 1.5, "tokens_per_second": 2000.0, "ms_per_step": 3.25, "peak_bytes": 123456}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder.create(tmp_path / "a", recall(), recipe="recall", environment={})
    for step in (10, 20):
        run.append_metrics({**LINE, "step": step})
        run.append_speed({**SPEED, "step": step})
    run.write_result({**LINE, "split": "test"})
    return run


READERS: dict[str, Callable[[RunFolder], Any]] = {
    "metrics.jsonl": RunFolder.read_metrics,
    "speed.jsonl": RunFolder.read_speed,
    "result.json": RunFolder.read_result,
}


def check_every_flip_is_seen(path: Path, read: Callable[[], Any]) -> None:
    """A flipped bit changes nothing that is read, as in a space or in the name of the checksum, or is refused."""
    whole, good = path.read_bytes(), repr(read())
    draw = random.Random(0)
    for place in range(len(whole) - 1):  # a last line without its end is one that a crash cut short
        damaged = bytearray(whole)
        damaged[place] ^= 1 << draw.randrange(7)
        path.write_bytes(bytes(damaged))
        try:
            found = repr(read())
        except UserError:
            continue
        assert same(found, good), (place, found)
    path.write_bytes(whole)


def same(found: str, good: str) -> bool:
    """Whether the fields are the same, apart from a checksum whose own name was damaged."""
    return found == good or all(part in found for part in good.strip("[]{}").split("}, {"))


@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_in_a_run_is_found(run, name):
    check_every_flip_is_seen(run.path / name, lambda: READERS[name](run) if (run.path / name).read_bytes() else None)


def test_what_is_read_is_what_was_written(run):
    assert [line["step"] for line in run.read_metrics()] == [10, 20] and run.read_speed()[0] == SPEED
    assert "checksum" not in run.read_result() and run.read_result()["split"] == "test"
    for line in (run.path / "metrics.jsonl").read_text().splitlines():  # as another program reads it
        assert len(json.loads(line).pop("checksum")) == 16


@pytest.mark.parametrize("name", READERS)
def test_a_file_of_a_run_without_its_checksum_is_refused(run, name):
    path = run.path / name
    lines = [json.loads(line) for line in path.read_text().splitlines()] if name.endswith(".jsonl") else []
    whole = "".join(json.dumps({k: v for k, v in line.items() if k != "checksum"}) + "\n" for line in lines)
    path.write_text(whole or json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "checksum"}))
    with pytest.raises(UserError, match=rf"{name} does not match its checksum: .*; restore it from a copy"):
        READERS[name](run)


def test_a_damaged_line_is_named(run):
    path = run.path / "metrics.jsonl"
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + second.replace("0.75", "0.74"))
    with pytest.raises(UserError, match=r"line 2 of .*metrics.jsonl does not match its checksum: it was damaged"):
        run.read_metrics()


def test_a_trace_with_a_lone_surrogate_is_read_again():
    line = seal_line(encode({"kind": "step", "text": "\ud800 é"}))
    assert check_line(json.loads(line), line, "it") == {"kind": "step", "text": "? é"}


def test_a_flipped_bit_in_a_trace_is_found(tmp_path):
    decoder, path = build("layer spans"), tmp_path / "trace.jsonl"
    trace_of(decoder, torch.randint(256, (3,))).save(path)
    assert "checksum" not in Trace.load(path).header
    check_every_flip_is_seen(path, lambda: list(read_lines(path)))
