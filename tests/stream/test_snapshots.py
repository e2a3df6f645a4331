"""What a row holds, taken out of a stream: a stream that goes on from it computes what the row would have computed."""

from __future__ import annotations

import pytest
import torch

from expire_span.models.state import bytes_of
from expire_span.models.systems import SYSTEMS
from expire_span.stream import Stream
from expire_span.stream.interface import row_of
from tests.stream.test_stream_rows import of_kind
from tests.stream_cases import CASES, build

TEXT = bytes(range(40, 120)) * 5
BOUND = 1e-5
"""Difference of logits of size 1 to 10 that float32 rounding explains, where sums are taken in another order."""


def goes_on(model, static_shapes, steps=40, prompt=TEXT[:150]):
    """Row 1 of three has read `prompt` and `steps` tokens more; its snapshot is read on, and joins another stream."""
    stream = Stream(model, 3, static_shapes=static_shapes)
    stream.read([TEXT[7:20], prompt, TEXT[:90]])
    tokens = torch.tensor(list(TEXT))
    for n in range(steps):
        stream.feed(tokens[[n, len(prompt) + n, 9 + n]])
    shot = stream.snapshot(1)
    held = [x.clone() for x in tensors_of(shot.state)]
    other = Stream(model, 2, static_shapes=static_shapes)
    other.join(TEXT[3:50])
    other.join(shot)
    read_on = other.prefill(tokens[len(prompt) + steps :][:34], shot)
    assert torch.equal(other.logits[1], stream.logits[1])
    for n in range(34):
        at = len(prompt) + steps + n
        stream.feed(tokens[[n, at, n]])
        other.feed(tokens[[n, at]])
        assert (other.logits[1] - stream.logits[1]).abs().max() < BOUND
    assert (read_on.logits[0] - stream.logits[1]).abs().max() < BOUND
    assert all(torch.equal(a, b) for a, b in zip(held, tensors_of(shot.state))), (
        "a snapshot is not changed by who uses it"
    )
    return shot


def tensors_of(state):
    from expire_span.models.state import pack

    return list(pack(state)[0].values())


@pytest.mark.parametrize("name", [name for name in CASES if name != "cap"])
@pytest.mark.parametrize("static_shapes", [True, False])
def test_a_snapshot_of_a_run_goes_on(name, static_shapes):
    goes_on(build(name), static_shapes)


@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_a_snapshot_of_every_memory_system_goes_on(kind):
    goes_on(build(of_kind(kind)), None, steps=9)


@pytest.mark.parametrize("steps", [0, 1, 31, 32, 33])
def test_a_snapshot_is_right_wherever_the_last_compaction_was(steps):
    goes_on(build("spans per head"), True, steps)
    goes_on(build(of_kind("sliding_window")), True, steps, TEXT[:3])


def test_a_snapshot_holds_what_is_alive():
    model = build("spans per head")
    stream = Stream(model, 1)
    stream.read([TEXT])
    shot = stream.snapshot(0)
    alive = [part["memory"].live(part["position"]) for part in shot.state]
    for part, living, layer in zip(shot.state, alive, stream.live_by_head):
        assert torch.equal(living, layer.long())
        assert len(part["memory"]) == int(living.max()) and part["position"] == len(TEXT)
    assert bytes_of(shot.state) < 1.2 * sum(int(x.sum()) for x in alive) * (2 * 8 * 4 + 12)


def test_idle_rows_have_no_snapshot():
    stream = Stream(build("layer spans"), 2)
    stream.join(b"abc", row=1)
    with pytest.raises(ValueError, match=r"row 0 is idle and holds nothing; name one of the rows in use, \[1\]"):
        stream.snapshot(0)
    with pytest.raises(ValueError, match=r"row must be a whole number in 0\.\.1, got 2"):
        stream.snapshot(2)


@pytest.mark.parametrize("kind", sorted(SYSTEMS))
def test_prompts_that_were_read_together_go_on_as_if_read_alone(kind):
    model = build(of_kind(kind))
    prompts, more = [TEXT[n : n + 70] for n in (0, 5, 11)], torch.tensor(list(TEXT))
    stream, alone = Stream(model, 4), Stream(model, 1)
    stream.join(TEXT[:9], row=1)
    read = stream.prefill_together(prompts)
    assert stream.join_together(read) == [0, 2, 3]
    alone.join(row_of(read, 1))
    wanted = Stream(model, 1)
    wanted.join(prompts[1])
    for n in range(5):
        for own in (stream.logits[2], alone.logits[0]):
            assert (own - wanted.logits[0]).abs().max() < BOUND
        stream.feed(more[[n, n, n, n]])
        for each in (alone, wanted):
            each.feed(more[[n]])
    with pytest.raises(ValueError, match="0 of 4 rows are idle, got 3 prompts to join"):
        stream.join_together(read)
