"""The verbs that stream: generate, eval --file, verify."""

from __future__ import annotations

import io
import json
import math
import signal

import pytest
import torch
from torch.nn import functional as F

from expire_span.checkpoint import load_decoder
from expire_span.cli.generate import Generate, _read_prompt
from expire_span.cli.verify import describe_deletions
from expire_span.models.systems import SYSTEMS
from expire_span.settings.run import DecoderConfig
from expire_span.stream.scoring import score_file
from expire_span.stream.verify import verify
from expire_span.tasks.text import BYTES
from expire_span.view.trace import Trace
from tests.cli.test_cli import call, check_refused, options
from tests.error_budget import DOUBLE, reordered
from tests.stream_cases import SHAPE, build
from tests.tiny import spawn

__all__ = ["call", "options"]  # fixtures


@pytest.fixture
def run(call, options, tmp_path):
    assert call("train", "text_tiny", "--name", "a", *options)[0] == 0
    return tmp_path / "runs/a"


def test_files_are_scored_in_bounded_memory_and_deletion_is_verified(call, run, tmp_path):
    (tmp_path / "t.bin").write_bytes(bytes(range(256)) * 12)
    code, out, _ = call("eval", "a", "--file", "t.bin")
    found = json.loads(out)
    assert code == 0 and found["bytes"] == 256 * 12 and len(found["live"]) == 2
    tokens = torch.tensor(list(range(256)) * 12)[None]
    with torch.inference_mode():
        decoder = load_decoder(run)
        loss = F.cross_entropy(decoder(tokens[:, :-1])[0][0], tokens[0, 1:])
    assert found["bits_per_byte"] == pytest.approx(loss.item() / math.log(2), rel=reordered(256, depth=13))
    assert found["peak_bytes_per_row"] < 256 * 12 * 2 * 16 * 4 * 2  # less than all keys and values
    check_refused(call("eval", "a", "--file", "absent"), "absent")
    (tmp_path / "one").write_bytes(b"x")
    check_refused(call("eval", "a", "--file", "one"), "at least 2 bytes, got 1")
    code, out, err = call("verify", "a", "--tokens", "150")
    assert code == 0 and "exact to rounding" in out and "memories were deleted" in out, out + err
    check_refused(call("verify", "a", "--tokens", "1"), "--tokens must be at least 2, got 1")
    assert _read_prompt(Generate("a", file=tmp_path / "t.bin")) == bytes(range(256)) * 12
    check_refused(call("generate", "a", "--file", "t.bin", "--prompt", "x"), "give --prompt or --file")


def test_verify_takes_the_shipped_model_where_none_is_named(call, tmp_path):
    """Options and their values are no names, even where a folder is called like one of them."""
    (tmp_path / "40").mkdir()
    (tmp_path / "runs").mkdir()
    code, out, err = call("verify", "--runs-dir", "runs", "--tokens", "40")
    assert code == 0 and "40 tokens streamed" in out and "exact to rounding" in out, out + err
    check_refused(call("verify", "40"), "no adapter at 40")


def test_a_run_of_books_reads_and_writes_characters(call, options, tmp_path):
    """Every command uses the alphabet that the run learned; rare characters share a token. With 255 characters, the vocabulary
    is as large as that of bytes."""
    alphabet = "the quick brown fox é " + "".join(chr(0x4E00 + n) for n in range(300))
    (tmp_path / "books").mkdir()
    for n in range(20):
        (tmp_path / f"books/{n:02d}.txt").write_text(alphabet * (2 + n))
    small = ["--task.path", "books", *options[options.index("--model.dim") :]]
    assert call("train", "books_tiny", "--name", "b", *small)[0] == 0
    (tmp_path / "new.txt").write_text("the quick 字 fox é\n" * 9)
    code, out, err = call("eval", "b", "--file", "new.txt")
    found = json.loads(out)
    assert code == 0 and found["characters"] == 18 * 9 and len(found["live"]) == 2, out + err
    assert 0 < found["bits_per_character"] < 20 and found["along"][-1]["to"] == 18 * 9 - 1
    code, out, err = call("generate", "b", "--prompt", "é", "--max-tokens", "60")
    assert code == 0 and len(out) == 62 and set(out) <= {*alphabet, "\ufffd", "\n"}, out + err
    assert sum(letter >= "\u4e00" for letter in out) > 20
    code, out, err = call("verify", "b", "--file", "new.txt")
    assert code == 0 and out.startswith(f"{18 * 9} tokens"), out + err
    assert call("trace", "b", "--text", "new.txt", "--out", "t.jsonl")[0] == 0
    trace = Trace.load(tmp_path / "t.jsonl")
    assert trace.header["vocabulary"] == "characters" and [step["text"] for step in trace.steps[:4]] == [
        "t",
        "h",
        "e",
        "␣",
    ]
    assert trace.steps[1]["bits"] > 0
    code, out, err = call("analyse", "b", "--text", "new.txt")
    assert code == 0, out + err


def test_an_endless_stream_is_fed_from_stdin_and_ends_cleanly(run):
    process = spawn("generate", str(run), "--prompt", "-", "--max-tokens", "None", text=False, stdin=-1)
    process.stdin.write(b"from a pipe")
    process.stdin.close()
    begun = process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    rest, err = process.stdout.read(), process.stderr.read()
    assert process.wait() == 0 and begun.startswith(b"from a pipe") and rest.endswith(b"\n"), err
    assert err == b""


def test_verify_finds_what_is_wrong(monkeypatch):
    decoder = build("spans per head")
    right = verify(decoder, tokens=150)
    assert right.difference <= right.allowed and right.deleted > 100 and right.evicted == 0
    assert describe_deletions(right).startswith(f"{right.deleted} of 1200 memories were deleted, 0 by the cap")
    assert verify(build("cap"), tokens=150).evicted > 0
    plain = {kind: DecoderConfig.modern(**SHAPE, mixer=SYSTEMS[kind].settings()) for kind in ("full", "gru")}
    assert describe_deletions(verify(build(plain["full"]), tokens=20)).startswith("0 of 40 memories were deleted")
    assert describe_deletions(verify(build(plain["gru"]), tokens=20)).endswith("not counted one by one")
    from expire_span.models import slot_step

    plain = slot_step.SlotStep._plain_step

    def forgets_too_soon(self, h):
        self.memory.slots.span -= 0.5
        return plain(self, h)

    monkeypatch.setattr(slot_step.SlotStep, "_plain_step", forgets_too_soon)
    wrong = verify(decoder, tokens=150)
    assert wrong.difference > wrong.allowed


def test_scores_do_not_depend_on_where_blocks_end(monkeypatch):
    decoder, text = build("layer spans"), bytes(range(200))
    read: list[int] = []
    whole = score_file(decoder, BYTES, io.BytesIO(text), progress=read.append)
    assert read[-1] == len(text)
    monkeypatch.setattr("expire_span.stream.scoring.PROMPT_BLOCK", 7)
    pieces = score_file(decoder, BYTES, io.BytesIO(text))
    assert pieces["bits_per_byte"] == pytest.approx(whole["bits_per_byte"], rel=reordered(200, depth=13))
    assert pieces["live"] == pytest.approx(whole["live"], rel=reordered(200, depth=13))


def test_scores_along_a_stream_add_up_and_stay_few(monkeypatch):
    """Stretches touch each other, cover the stream, weigh up to its means, and are no more for a longer one."""
    decoder, text = build("layer spans"), bytes(range(200))
    monkeypatch.setattr("expire_span.stream.scoring.PROMPT_BLOCK", 3)
    monkeypatch.setattr("expire_span.stream.scoring.STRETCHES", 4)
    found = score_file(decoder, BYTES, io.BytesIO(text))
    along = found["along"]
    assert 4 <= len(along) <= 8
    assert [part["from"] for part in along] == [0, *(part["to"] for part in along[:-1])] and along[-1]["to"] == 199
    weighed = lambda value: sum((part["to"] - part["from"]) * value(part) for part in along) / 199  # noqa: E731
    assert weighed(lambda part: part["bits"]) == pytest.approx(found["bits_per_byte"], rel=DOUBLE)
    assert weighed(lambda part: part["live"][0]) == pytest.approx(found["live"][0], rel=DOUBLE)
    assert along[0]["live"][0] < along[-1]["live"][0], "memory fills at first"
