"""Streams on a GPU: what is recorded equals what is launched, and the undeleted computation."""

from __future__ import annotations

import pytest
import torch

from benchmarks.exact_streams import build, difference, kinds
from expire_span.ops.graphs import record_graph
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


def test_the_first_replay_waits_for_the_recording(monkeypatch):
    """PyTorch sets a generator's offset to zero on the stream that records. If that stream is late, as on a busy GPU, the zero
    must not come between a replay's own offset and the draw that reads it."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def begin_late(graph, *args, **options):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms of the stream that records
        begin(graph, *args, **options)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", begin_late)
    x, draws = torch.empty(8, device=DEVICE), []
    for recorded in (True, False):
        generator, graph = torch.Generator(DEVICE).manual_seed(3), torch.cuda.CUDAGraph()
        x.uniform_(generator=generator)
        if recorded:
            graph.register_generator_state(generator)
            with record_graph(graph):
                torch.cuda._sleep(400_000_000)  # the draw comes long after the replay's offset was set
                x.uniform_(generator=generator)
            graph.replay()
        else:
            x.uniform_(generator=generator)
        draws.append(x.tolist())
    assert draws[0] == draws[1]


def test_rows_are_replaced_and_buffers_grow_under_recording():
    decoder = build(kinds()["learned reach"]).to(DEVICE)
    alone, stream = Stream(decoder, 1), Stream(decoder, 3)
    text = torch.randint(256, (700,), generator=torch.Generator().manual_seed(0))
    stream.read([b"a", b"bb", b"ccc"])
    texts = []
    for step in stream.generate(Sampling(temperature=0), 30):
        texts.append(int(step.tokens[1]))
        if len(texts) == 21:
            stream.join(text, row=1)
    alone.read([text])
    wanted = [int(step.tokens) for step in alone.generate(Sampling(temperature=0), 40)]
    found = [int(step.tokens[1]) for step in stream.generate(Sampling(temperature=0), 32)]
    assert texts[21:] + found == [-1, *wanted]  # the step after the last one seen was under way
