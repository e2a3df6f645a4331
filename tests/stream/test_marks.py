"""Tokens with lifetimes of their own: kept ones never expire, others are gone at the age that was given and read by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf import Retrofit
from expire_span.models.marks import LATEST, override
from expire_span.store.slots import FRESH
from expire_span.stream import FREE, KEEP, Stream
from tests.hf_models import forgetful, tiny
from tests.stream.test_snapshots import BOUND
from tests.stream.test_stream_rows import of_kind
from tests.stream_cases import CASES, build

TEXT = torch.arange(90).repeat(6) + 3
CUT = 60
"""Tokens 20 to 59 of a prompt are marked."""
MODELS = {
    "llama": lambda: forgetful(tiny(), max_span=40, ramp=4),
    "gpt2": lambda: forgetful(tiny("gpt2"), max_span=40, ramp=4, keep_first=6),
    "gemma3": lambda: forgetful(tiny("gemma3"), max_span=40, ramp=4, keep_first=30),
    **{name: lambda name=name: build(name) for name in CASES if name != "cap"},
}


def marked(mark):
    marks = torch.full((130,), FREE)
    marks[20:CUT] = mark
    return marks


def births(layer):
    """Positions of what a layer's state holds alive."""
    memory = layer["memory"]
    return memory.pos[memory.remaining(layer["position"]) > 0]


@pytest.mark.parametrize("mark", [FREE, 0, 1, 25, 300, LATEST, KEEP])
def test_marks_change_spans_as_they_say(mark):
    """By a loop over single tokens: alive at age a exactly if the prediction is, or the token is kept, and a < mark."""
    span = torch.tensor([[-4.0, 0.0, 3.5, 20.5, 90.0]])
    found = override(span.unsqueeze(1), torch.full((1, 5), mark), 4.0)[0, 0]
    for before, after in zip(span[0].tolist(), found.tolist()):
        for age in range(200):
            predicted = before - age > -4
            wanted = True if mark == KEEP else predicted and (mark == FREE or age < mark)
            assert (after - age > -4) == wanted, (before, after, age)


@pytest.mark.parametrize("name", MODELS)
def test_kept_tokens_stay_and_expiring_ones_are_gone_at_their_age(name):
    model = MODELS[name]()
    layers = model.layers if isinstance(model, Retrofit) else []
    windows = {n for n, x in enumerate(layers) if x.window is not None}
    for mark in (KEEP, 30):
        stream = Stream(model, 2, static_shapes=True)
        stream.read([TEXT[:9], TEXT[:130]], [None, marked(mark)])
        state = stream.snapshot(1).state
        for n in range(3 * FRESH):
            at = 130 + n
            for layer, part in enumerate(state):
                held = births(part)
                inside = (held >= 20) & (held < CUT)
                if mark == KEEP and layer not in windows:
                    assert set(held[inside].tolist()) == set(range(20, CUT)), (layer, n)
                elif mark != KEEP:
                    assert not (inside & (at - held >= mark)).any(), (layer, n)
            stream.feed(TEXT[[n, at]])
            state = stream.snapshot(1).state if n % 5 == 4 else []


@pytest.mark.parametrize("name", MODELS)
def test_marks_do_not_depend_on_how_tokens_are_read(name):
    """Whole, in parts with a snapshot between them, and beside another row."""
    model = MODELS[name]()
    marks = torch.full((130,), FREE)
    marks[5:15], marks[20:40], marks[40:CUT] = KEEP, 70, 12
    stream = Stream(model, 2)
    whole = stream.prefill(TEXT[:130], marks=marks).logits
    stream.read([TEXT[1:131], TEXT[:130]], [None, marks])
    assert (stream.logits[1] - whole[0]).abs().max() < BOUND
    parts = None
    for begin, end in ((0, 7), (7, 33), (33, 100), (100, 130)):
        parts = stream.prefill(TEXT[begin:end], parts, marks[begin:end])
    assert (parts.logits - whole).abs().max() < BOUND
    assert (stream.prefill(TEXT[:130]).logits - whole).abs().max() > 100 * BOUND, "the marks matter"


@torch.inference_mode()
def overwrite(slots, born, generator):
    """Put random values into the slots whose memories were born at these positions, counted as the slots count."""
    hit = torch.isin(slots.pos, born.float())
    for x in (slots.k, slots.v):
        x[hit] = 100 * torch.randn(x[hit].shape, generator=generator)
    return int(hit.sum())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt2"])
def test_nothing_reads_a_message_after_its_death(name):
    """Its slots are overwritten with random values: while it lives, the next logits change; afterwards not by one bit."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(0)
    for n, dead in ((2, False), (20, True), (FRESH - 1, True)):
        stream = Stream(model, 1, static_shapes=True)
        marks = torch.full((130,), FREE)
        marks[120:130] = torch.arange(19, 9, -1)  # gone ten tokens after the last of them
        stream.read([TEXT[:130]], [marks])
        for at in range(130, 130 + n):
            stream.feed(TEXT[at : at + 1])
        twin = stream.fork([0])
        hits = 0
        for memory in twin._engine.stepper.memories:
            column = stream._engine.clock.column
            hits += overwrite(memory.slots, torch.arange(120, 130) - (130 + n) + column, generator)
        assert hits
        for at in range(130 + n, 190):
            stream.feed(TEXT[at : at + 1])
            twin.feed(TEXT[at : at + 1])
            if dead:
                assert torch.equal(stream.logits, twin.logits), (n, at)
            else:
                assert not torch.equal(stream.logits, twin.logits), (n, at)
                break


@pytest.mark.parametrize("name", ["llama", "layer spans", "learned reach"])
def test_slots_grow_for_kept_tokens_beyond_every_span(name, tmp_path):
    """Far more kept tokens than a span is long; copies and saved streams go on with as much room."""
    model = MODELS[name]()
    tokens, marks = TEXT[:450], torch.full((450,), KEEP)
    stream, plain = Stream(model, 2, static_shapes=True), Stream(model, 1, static_shapes=False)
    stream.join(tokens[:3])
    stream.join(stream.prefill(tokens, marks=marks))
    plain.join(plain.prefill(tokens, marks=marks))
    stream.save(tmp_path / "saved")
    others = [stream.fork([0, 1]), Stream.load(model, tmp_path / "saved")]
    for n in range(70):
        plain.feed(TEXT[n : n + 1])
        for each in (stream, *others):
            each.feed(TEXT[[n, n]])
            assert (each.logits[1] - plain.logits[0]).abs().max() < BOUND, n
    assert all(int(layer[1].min()) >= 450 for layer in stream.live_by_head)


def test_bad_marks_are_named():
    stream = Stream(build("layer spans"), 2)
    for marks, words in {
        (1, 2): r"marks must be one whole number for each of 3 tokens, got shape \(2,\)",
        (1.0, 2.0, 3.0): "got shape .* of torch.float32",
        (0, -2, 5): r"a mark must be FREE, KEEP or an age of 0 to 16,777,216, got -2",
        (0, LATEST + 1, KEEP): "got 16777217",
    }.items():
        with pytest.raises(ValueError, match=words):
            stream.prefill(b"abc", marks=marks)
        with pytest.raises(ValueError, match=words + ".* for row 1"):
            stream.read([b"xy", b"abc"], [None, marks])
    with pytest.raises(ValueError, match="read takes marks for each of 2 prompts, or None for some, got 1"):
        stream.read([b"xy", b"abc"], [None])


def test_models_that_cannot_give_such_lifetimes_say_so():
    mistral = Stream(forgetful(tiny("mistral")), 1)
    with pytest.raises(ValueError, match="reads the last 24 tokens in every layer, so no token can be kept for longer"):
        mistral.prefill([5, 6], marks=[KEEP, FREE])
    mistral.prefill([5, 6], marks=[3, FREE])
    for kind in ("gru", "sliding_window"):
        stream = Stream(build(of_kind(kind)), 1)
        with pytest.raises(ValueError, match=f"layers of {kind} have no lifetimes, so no token can be kept"):
            stream.prefill(b"ab", marks=[KEEP, FREE])
        with pytest.raises(ValueError, match=f"layers of {kind} do not forget single tokens, so none can expire"):
            stream.prefill(b"ab", marks=[4, FREE])
