"""Streams on a GPU: what is recorded equals what is launched, and the undeleted computation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.exact_streams import build, difference, kinds
from expire_span.store.slots import FRESH
from expire_span.stream import Sampling, Stream

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda")


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "launched"])
@pytest.mark.parametrize("name", kinds())
def test_streamed_equals_undeleted(name, recorded):
    assert difference(kinds()[name], DEVICE, 2 * FRESH + 30, recorded) <= 1e-5


def test_recorded_draws_follow_the_seed_and_continue():
    decoder = build(kinds()["learned reach"]).to(DEVICE)
    texts = []
    for recorded, parts in ((True, [150]), (True, [40, 110]), (False, [150])):
        stream = Stream(decoder, 2, recorded=recorded)
        stream.read([b"one", b"another"])
        steps = [step.tokens for count in parts for step in stream.generate(Sampling(seed=3), count)]
        texts.append(torch.stack(steps).tolist())
    assert texts[0] == texts[1] == texts[2]


def test_rows_are_replaced_and_buffers_grow_under_recording():
    decoder = build(kinds()["learned reach"]).to(DEVICE)
    alone, stream = Stream(decoder, 1), Stream(decoder, 3)
    text = torch.randint(256, (700,), generator=torch.Generator().manual_seed(0))
    stream.read([b"a", b"bb", b"ccc"])
    texts = []
    for step in stream.generate(Sampling(temperature=0), 30):
        texts.append(int(step.tokens[1]))
        if len(texts) == 21:
            stream.replace(1, text)
    alone.read([text])
    wanted = [int(step.tokens) for step in alone.generate(Sampling(temperature=0), 40)]
    found = [int(step.tokens[1]) for step in stream.generate(Sampling(temperature=0), 32)]
    assert texts[21:] + found == [-1, *wanted]  # the step after the last one seen was under way
