"""Rows of streams: idle ones, how many memories of each live, how many fit, and steps that are interrupted."""

from __future__ import annotations

import itertools

import pytest
import torch

from expire_span.models.systems import SYSTEMS
from expire_span.settings.run import DecoderConfig
from expire_span.stream import Stream
from tests.stream.test_stream import GREEDY, refuse, texts_of
from tests.stream_cases import SHAPE, build


def of_kind(kind: str, **options: object) -> DecoderConfig:
    system = SYSTEMS[kind]
    return DecoderConfig.modern(**SHAPE, mixer=system.settings(**system.example), **options)


@pytest.mark.parametrize("case", ["cap", of_kind("full"), of_kind("compressive")], ids=["cap", "full", "compressive"])
def test_idle_rows_write_and_hold_nothing(case):
    stream = Stream(build(case), 3)
    stream.read([b"one", b"two", b"three"])
    texts_of(stream, 20)
    held = stream.bytes_held
    stream.read([b"only one"])
    assert stream.static_shapes or stream.bytes_held < held / 2, "a new read frees the rows that it leaves idle"
    step = next(stream.generate(GREEDY, 1, events=True))
    assert [token >= 0 for token in step.tokens.tolist()] == [True, False, False]
    assert (stream.live[:, 0] > 0).all() and (stream.live[:, 1:] == 0).all()
    for happened in step.events or []:
        assert happened.born[1:].isnan().all() and not happened.born[0].isnan().any()
        assert all(row == 0 for row, _, _ in happened.died)


@pytest.mark.parametrize("kind", ["full", "compressive"])
def test_living_memories_are_counted_where_the_decoder_is_called(kind, tmp_path):
    decoder = build(of_kind(kind))
    stream = Stream(decoder, 2)
    stream.read([b"eleven byte", b"five5"])
    first = stream.live.clone()
    assert kind != "full" or first.tolist() == [[11, 5]] * 2
    assert (first > 0).all()
    texts_of(stream, 9)
    now = stream.live
    assert (now > first).all() and (kind != "full" or now.tolist() == [[20, 14]] * 2)
    stream.save(tmp_path / "saved")
    assert torch.equal(stream.fork([1, 0]).live, now[:, [1, 0]])
    assert torch.equal(Stream.load(decoder, tmp_path / "saved").live, now)
    stream.join(b"a", row=0)
    assert (stream.live[:, 0] < now[:, 0]).all() and torch.equal(stream.live[:, 1], now[:, 1])


@pytest.mark.parametrize("kind", ["full", "gru", "expire_span"])
def test_more_rows_than_fit_are_refused(kind, monkeypatch):
    monkeypatch.setattr("expire_span.stream.memory_check.free_bytes", lambda device: 2**20)
    decoder = build(of_kind(kind))
    with pytest.raises(ValueError, match=r"^999 rows need at least .* GiB are free; take at most \d+ rows$") as found:
        Stream(decoder, 999)
    most = int(str(found.value).split()[-2])
    stream = Stream(decoder, most)
    stream.read([b"a"])
    refuse(f"take at most {most} rows", lambda: stream.fork([0] * (most + 1)))
    assert stream.fork([0] * 3).rows == 3


def test_an_interrupted_step_is_taken_again(monkeypatch):
    """Ctrl-C may come between the calls for two groups of rows."""
    decoder = build(of_kind("full"))
    streams = [Stream(decoder, 2) for _ in range(2)]
    for stream in streams:
        stream.read([b"one", b"another"])
    call, calls = type(decoder).forward, itertools.count()

    def interrupted(self, *args, **options):
        if next(calls) == 5:
            raise KeyboardInterrupt
        return call(self, *args, **options)

    monkeypatch.setattr(type(decoder), "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        texts_of(stream, 20)
    monkeypatch.undo()
    assert stream.position == 2 and texts_of(stream, 10) == [text[2:] for text in texts_of(streams[0], 12)]
