"""Streams: exact, of any length, bounded; rows are replaced, copied and saved; bad input is refused."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from expire_span.errors import StorageError, UserError
from expire_span.models.decoder import Decoder
from expire_span.models.systems import SYSTEMS
from expire_span.settings.run import DecoderConfig
from expire_span.store.slots import FRESH
from expire_span.store.tensor_files import to_bytes
from expire_span.stream import Sampling, Stream, saved
from expire_span.stream.decoders import model_of
from expire_span.stream.tokens import Flight
from tests.error_budget import reordered
from tests.stream_cases import CASES, SHAPE, build, without_initial

GREEDY = Sampling(temperature=0)
EXACT = reordered(64, depth=13)
"""Logits of about 1 after two layers of six products each and a head, with sums of 64 terms; 2e-5."""
PAGE = (Path(__file__).parent.parent.parent / "docs/serving.md").read_text()
STATIC = re.findall(r"`(\w+)`", PAGE.split("Which systems have such steps:")[1].split("models whose layers")[0])
"""Systems with steps of fixed shapes, as the page names them; add a new one there if its state is fixed or lies in slots."""


def drive(stream: Stream, tokens: torch.Tensor) -> torch.Tensor:
    """Logits after each of the tokens [B, T], which are given instead of drawn: [B, T, V]."""
    found = []
    for token in tokens.unbind(1):
        stream.feed(token)
        found.append(stream.logits)
    return torch.stack(found, 1)


def undeleted(decoder: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the whole sequence in one pass, where nothing is deleted: the mask alone ends lives."""
    with torch.inference_mode():
        return decoder(tokens, decoder.initial_state(len(tokens), "hidden"))[0]


@pytest.mark.parametrize("name", CASES)
def test_streamed_equals_undeleted_and_the_plain_path(name):
    decoder = build(name)
    tokens = torch.randint(256, (2, 2 * FRESH + 90))
    first, last = 50, 2 * FRESH + 70
    stream = Stream(decoder, rows=2)
    stream.read(list(tokens[:, :first]))
    found = drive(stream, tokens[:, first:])
    if name != "cap":  # a cap departs from exactness, and counts how often
        torch.testing.assert_close(found, undeleted(decoder, tokens)[:, first:], rtol=0, atol=EXACT)
        first_plain = last
    else:
        assert stream.evicted
        first_plain = first
    torch.testing.assert_close(
        found[:, first_plain - first :], plain_path(decoder, tokens, first_plain), rtol=0, atol=EXACT
    )
    assert (found - found.mean(1, keepdim=True)).abs().max() > 0.05  # the outputs do depend on the tokens


def plain_path(decoder: Decoder, tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Logits of single tokens through the decoder itself, after a block of the `first` ones."""
    plain = []
    with torch.inference_mode():
        _, state, _ = decoder(tokens[:, :first])
        for token in tokens[:, first:].unbind(1):
            logits, state, _ = decoder(token[:, None], state)
            plain.append(logits[:, -1])
    return torch.stack(plain, 1)


def test_many_memories_die(name: str = "spans per head"):
    """The case above would be empty if all memories lived on."""
    stream = Stream(build(name), rows=1)
    stream.read([torch.randint(256, (300,))])
    assert (stream.live < 60).all() and (stream.live > 2).all()


@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_every_memory_system_streams_as_its_decoder_does(kind):
    system = SYSTEMS[kind]
    decoder = build(DecoderConfig.modern(**SHAPE, mixer=system.settings(**system.example)))
    assert Stream(decoder, 1).static_shapes == (kind in STATIC), (
        "docs/serving.md names the systems with steps of fixed shapes"
    )
    prompts = [torch.randint(256, (n,)) for n in (13, 9, 13)]
    stream = Stream(decoder, rows=3)
    stream.read(prompts)
    texts = torch.stack([step.tokens for step in stream.generate(GREEDY, 20)], 1)
    for prompt, text in zip(prompts, texts):
        state, token, expected = None, prompt[None], []
        with torch.inference_mode():
            for _ in range(20):
                logits, state, _ = decoder(token, state)
                token = logits[:, -1:].argmax(-1)
                expected.append(int(token))
        assert text.tolist() == expected


def test_memory_is_bounded_and_positions_stay_small():
    stream = Stream(build("learned reach"), rows=2)
    stream.read([b"a", b"bcd"])
    held = []
    for _ in itertools.islice(stream.generate(Sampling(seed=1)), 16 * FRESH):
        held.append(stream.bytes_held)
    assert max(held[6 * FRESH :]) <= max(held[: 6 * FRESH])  # by then, the longest lifetimes have ended
    assert all(memory.slots.pos.abs().max() < 100 + 2 * FRESH for memory in stream._engine.stepper.memories)


def test_a_stream_far_from_its_start_is_as_exact():
    """Ten million steps on, angles are as exact: the outputs are those of a young stream."""
    decoder = build("learned reach")
    tokens = torch.randint(256, (1, 200))
    young, old = Stream(decoder, 1), Stream(decoder, 1)
    for stream, epoch in ((young, 0), (old, 10_000_000 // FRESH * FRESH)):
        with torch.inference_mode():
            stream._engine.clock.set(epoch, 0)
        stream.read([tokens[0, :40]])
    torch.testing.assert_close(drive(young, tokens[:, 40:]), drive(old, tokens[:, 40:]), rtol=0, atol=EXACT)


def texts_of(stream: Stream, count: int, sampling: Sampling = GREEDY) -> list[list[int]]:
    return torch.stack([step.tokens for step in stream.generate(sampling, count)], 1).tolist()


def test_rows_are_replaced_while_others_go_on():
    decoder = build("spans per head")
    alone = Stream(decoder, 1)
    alone.read([b"second"])
    wanted = texts_of(alone, 30)[0]
    stream = Stream(decoder, 2)
    stream.read([b"first prompt", b"gone soon"])
    undisturbed = Stream(decoder, 2)
    undisturbed.read([b"first prompt", b"gone soon"])
    texts_of(stream, FRESH + 7)
    assert stream.join(b"second", row=1) == 1
    after = texts_of(stream, 30)
    assert after[1] == wanted and after[0] == texts_of(undisturbed, FRESH + 37)[0][FRESH + 7 :]


def test_tokens_of_a_running_step_are_dropped_when_their_row_is_replaced(monkeypatch):
    """On a GPU a step is launched before the tokens of the one before are read: the same order of calls, on any device."""
    monkeypatch.setattr("expire_span.stream.stream.send_to_host", lambda tokens: Flight(tokens.clone()))
    decoder = build("spans per head")
    wanted, stream, late = Stream(decoder, 1), Stream(decoder, 2), Stream(decoder, 2)
    wanted.read([b"second"])
    for each in (stream, late):
        each.read([b"first prompt", b"gone soon"])
    late._engine.lookahead = True
    texts: list[list[int]] = []
    for n, step in enumerate(late.generate(GREEDY, 30)):
        texts.append(step.tokens.tolist())
        if n == 9:
            late.join(b"second", row=1)
    assert [row[0] for row in texts] == texts_of(stream, 30)[0]
    assert [row[1] for row in texts[10:]] == [-1, *texts_of(wanted, 19)[0]]
    assert late.position == 30


def test_a_hybrid_reports_what_happened_layer_by_layer():
    layers = SHAPE | {"layers": 3}
    spans = CASES["spans per head"].mixer
    config = DecoderConfig.modern(**layers, mixer=spans, partner=SYSTEMS["gru"].settings(), pattern="pmm")
    decoder, tokens = build(config), torch.randint(256, (1, 120))
    stream = Stream(decoder, 1)
    assert stream.static_shapes
    stream.read([tokens[0, :30]])
    torch.testing.assert_close(drive(stream, tokens[:, 30:]), undeleted(decoder, tokens)[:, 30:], rtol=0, atol=EXACT)
    step = next(stream.generate(GREEDY, 1, events=True))
    assert [tuple(happened.born.shape) for happened in step.events or []] == [(1, 0), (1, 4), (1, 4)]


@pytest.mark.parametrize("name", ["learned reach", "plain"])
def test_forks_are_independent_and_saved_streams_go_on(name, tmp_path):
    config = CASES[name] if name in CASES else DecoderConfig.modern(**SHAPE, mixer=SYSTEMS["full"].settings())
    decoder, sampling = build(config), Sampling(seed=5)
    stream = Stream(decoder, 2)
    stream.read([b"one", b"another"])
    count = FRESH + 20 if stream.static_shapes else 12
    texts_of(stream, 20, sampling)
    fork = stream.fork([1, 1, 0])
    stream.save(tmp_path / "stream.safetensors")
    wanted = texts_of(stream, count, sampling)
    saved = Stream.load(decoder, tmp_path / "stream.safetensors")
    assert texts_of(saved, count, sampling) == wanted
    texts = texts_of(fork, 30)
    assert texts[0] == texts[1] and texts[0] != texts[2]
    assert saved.position == stream.position == 20 + count


def test_a_stream_saved_with_another_number_of_fresh_slots_is_refused(tmp_path):
    stream = Stream(build(CASES["cap"]), 1)
    stream.read([b"one"])
    stream.save(tmp_path / "saved")
    model = model_of(stream.model).fingerprint()
    tensors, meta = saved.read_saved(tmp_path / "saved", model)
    saved.write_saved(tmp_path / "saved", model, tensors, {**meta, "engine": {**meta["engine"], "fresh": 64}})
    with pytest.raises(
        UserError, match=f"saved with 64 fresh slots, and this version has {FRESH}; read the prompts again"
    ):
        Stream.load(stream.model, tmp_path / "saved")


def test_breaking_off_loses_nothing():
    decoder, sampling = build("layer spans"), Sampling(seed=2)
    streams = [Stream(decoder, 1) for _ in range(2)]
    for stream in streams:
        stream.read([b"text"])
    pieces = []
    for _ in range(5):
        for step in stream.generate(sampling):
            pieces.append(int(step.tokens))
            if len(pieces) % 6 == 0:
                break
    assert pieces == texts_of(streams[0], 30, sampling)[0]


WHOLE_SPANS = DecoderConfig.modern(**SHAPE, mixer=SYSTEMS["transformer_xl"].settings(span=11))
"""Memories whose lives end at exactly a step."""


@pytest.mark.parametrize("case", ["spans per head", "cap", WHOLE_SPANS], ids=["spans per head", "cap", "whole spans"])
def test_events_tell_who_was_born_and_who_died(case):
    stream = Stream(build(case), 2)
    stream.read([b"a", b"b"])
    living = [{(r, h, -1) for r in range(2) for h in range(4)} for _ in range(2)]
    for n, step in enumerate(stream.generate(Sampling(), FRESH + 30, events=True)):
        assert step.events is not None
        for layer, (happened, alive) in enumerate(zip(step.events, living)):
            assert happened.born.shape == (2, 4)
            alive |= {(r, h, n) for r in range(2) for h in range(4)}
            assert set(happened.died) <= alive
            alive -= set(happened.died)
            assert int(stream.live_by_head[layer].sum()) == len(alive)


def refuse(says: str, call: Callable[[], object], kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=says) as found:
        call()
    assert "\n" not in str(found.value)


def test_bad_input_is_named(tmp_path):
    decoder = build("layer spans")
    stream = Stream(decoder, 2)
    refuse("read no prompt yet", lambda: stream.generate())
    refuse("0..255, the model's vocabulary, got 256 in the prompt of row 1", lambda: stream.read([[1], [3, 256]]))
    refuse("got -1 in the prompt of row 0", lambda: stream.read([[-1]]))
    refuse("at least one token", lambda: stream.read([b""]))
    refuse("integers, got torch.float32", lambda: stream.read([torch.ones(3)]))
    refuse("1 to 2 prompts, one for each row, got 3", lambda: stream.read([b"a"] * 3))
    refuse("integers, got torch.complex64", lambda: stream.read([torch.ones(3, dtype=torch.complex64)]))
    refuse("a list of prompts, one for each row, got 5", lambda: stream.read(5))  # type: ignore[arg-type]
    for row in (2, True, 1.0):
        refuse(f"row must be a whole number in 0..1, got {row}", lambda row=row: stream.join(b"x", row))
        refuse(f"row must be a whole number in 0..1, got {row}", lambda row=row: stream.fork([0, row]))
    refuse(r"fork takes a list of rows, got 0; give \[row\]", lambda: stream.fork(0))  # type: ignore[arg-type]
    refuse("max_tokens must be a whole number, 0 or more, got -1", lambda: stream.generate(max_tokens=-1))
    refuse("max_tokens must be a whole number, 0 or more, got True", lambda: stream.generate(max_tokens=True))
    for rows in (0, True):
        refuse(f"rows must be a whole number of at least 1, got {rows}", lambda rows=rows: Stream(decoder, rows))
    refuse(r"take at most \d+ rows", lambda: Stream(decoder, 10**12))
    refuse("a stream runs a Decoder or a Retrofit, got str", lambda: Stream.load("runs/mine", tmp_path / "mine"))  # type: ignore[arg-type]
    stream.read([b"a", b"b"])
    stream.save(tmp_path / "mine")
    refuse("saved by another model", lambda: Stream.load(build("layer spans", seed=1), tmp_path / "mine"))
    data = (tmp_path / "mine").read_bytes()
    (tmp_path / "flipped").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refuse("does not match its checksum", lambda: Stream.load(decoder, tmp_path / "flipped"))
    (tmp_path / "text").write_text("nothing")
    refuse("not a saved stream", lambda: Stream.load(decoder, tmp_path / "text"))
    refuse("not a saved stream that can be read: ", lambda: Stream.load(decoder, tmp_path / "absent"))
    refuse("can be read: it is a folder", lambda: Stream.load(decoder, tmp_path))
    right = {"format": saved.FORMAT, "model": model_of(decoder).fingerprint()}
    for head, words in [
        ([], "got no stream; read the prompts again and save that stream"),
        ({"format": saved.FORMAT}, "another model"),
        (right, "this version can read"),
    ]:
        (tmp_path / "foreign").write_bytes(to_bytes({}, {"stream": json.dumps(head)}))
        refuse(words, lambda: Stream.load(decoder, tmp_path / "foreign"))


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    stream = Stream(build("layer spans"), 1)
    stream.read([b"a"])
    path = tmp_path / "stream"
    stream.save(path)
    before = path.read_bytes()
    texts_of(stream, 3)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("expire_span.disk.files.write_synced", full)
    refuse("the disk is full; it goes on in memory", lambda: stream.save(path), StorageError)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["stream"]
    assert len(texts_of(stream, 3)[0]) == 3


def test_short_prompts_of_different_lengths_are_read_step_by_step(monkeypatch):
    """What a GPU does with them, on any device."""
    decoder = build(without_initial(CASES["paper preset"]))
    prompts = [torch.randint(256, (n,)) for n in (70, 5, 31)]
    streams = [Stream(decoder, 3) for _ in range(2)]
    streams[0].read(prompts)
    monkeypatch.setattr(Stream, "_reads_in_step", lambda stream, prompts: True)
    streams[1].read(prompts)
    torch.testing.assert_close(streams[0].logits, streams[1].logits, rtol=0, atol=EXACT)
