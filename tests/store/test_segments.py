"""The decode kernel on the segment layout, compared with the same rows in the rectangle layout."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from expire_span.models.decoder import Decoder
from expire_span.ops import attend_in_segments, expire_attention
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.store import ExpiringMemory
from tests.error_budget import reordered
from tests.triton_interpreter import DEVICE, ON_GPU, small_tiles

pytestmark = [pytest.mark.usefixtures(small_tiles.__name__), *([pytest.mark.gpu] if ON_GPU else [])]

RAMP, DIM = 7.0, 32


def unequal_store(per_head: bool, batch: int, heads: int, last: int) -> ExpiringMemory:
    """300 steps in which some rows remember ten times as long as others, the last `last` of them appended one by one."""
    g = torch.Generator().manual_seed(3)
    rows = (batch, heads) if per_head else (batch,)
    scale = torch.full(rows, 12.0)
    scale.view(-1)[1::3] = 140.0
    spans = torch.rand(*rows, 300, generator=g) * scale.unsqueeze(-1)
    k, v = (torch.randn(batch, heads, 300, DIM, generator=g) for _ in range(2))
    memory = ExpiringMemory.empty(rows, ramp=RAMP, device=DEVICE)
    cuts = [0, 100, 200, 300 - last, *range(301 - last, 301)]
    for start, stop in pairwise(cuts):
        keys, values = (x[:, :, start:stop] if per_head else x[:, :, start:stop].transpose(1, 2) for x in (k, v))
        fields = {"k": keys.to(DEVICE), "v": values.to(DEVICE)}
        memory = memory.append(torch.arange(start, stop, device=DEVICE), spans[..., start:stop].to(DEVICE), **fields)
        memory = memory.expire(stop) if stop < 300 else memory
    assert memory.segments is not None
    return memory


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("last", [1, 5])
@pytest.mark.parametrize(("per_head", "batch", "heads"), [(True, 2, 2), (True, 1, 3), (False, 4, 2)])
def test_rows_read_in_place_equal_the_rectangle(per_head, batch, heads, last, queries):
    memory = unequal_store(per_head, batch, heads, last)
    g = torch.Generator().manual_seed(4)
    q = torch.randn(batch, 2 * heads, queries, DIM, generator=g).to(DEVICE)
    relative = torch.randn(9, DIM, generator=g).to(DEVICE) if last == 5 else None
    pos = torch.arange(300 - queries, 300, device=DEVICE)
    rules = dict(ramp=RAMP, relative_keys=relative)
    with torch.no_grad():
        got = attend_in_segments(
            q, *(memory.slots[n] for n in ("k", "v", "span")), pos, memory.slots["pos"], memory.row_places(), **rules
        )
        k, v = (memory[n] if per_head else memory[n].transpose(1, 2) for n in ("k", "v"))
        want = expire_attention(
            q.double(), k.double(), v.double(), memory.span.double(), pos, memory.pos,
            ramp=RAMP, relative_keys=None if relative is None else relative.double(), impl="reference",
        )  # fmt: skip
    # Scores sum DIM products, the output 300 weighted values of about 1.
    torch.testing.assert_close(got.double(), want, rtol=0, atol=reordered(300 + DIM, depth=2))


@pytest.mark.parametrize("span_per", ["layer", "kv_head"])
def test_a_decoder_reads_its_rows_in_place(span_per, monkeypatch):
    mixer = ExpireSpanConfig(max_span=64, ramp=4, initial_span=0.4, temperature=0.2, span_per=span_per)
    model = DecoderConfig.modern(vocab=12, dim=64, layers=2, heads=2, ff_dim=32, mixer=mixer)
    torch.manual_seed(0)
    decoder = Decoder(model).to(DEVICE).eval()
    for block in decoder.layers():
        torch.nn.init.normal_(block.mixer.span_predictor.weight, std=1.0)
    tokens = torch.tensor([[2], [5], [9]]).repeat(1, 130).to(DEVICE)  # rows that differ all through
    tokens[:, ::7] = 1
    called = []
    decode = type(decoder.layers()[0].mixer)._read_in_place
    monkeypatch.setattr(type(decoder.layers()[0].mixer), "_read_in_place", lambda *a: called.append(1) or decode(*a))
    outs = {}
    with torch.no_grad():
        _, start, _ = decoder(tokens[:, :120])
    for impl in ("chunked", "triton"):
        for block in decoder.layers():
            block.mixer.rules = replace(block.mixer.rules, impl=impl)
        with torch.no_grad():
            parts, state = [], start
            for n in range(120, 124):
                logits, state, aux = decoder(tokens[:, n : n + 1], state)
                parts.append(torch.cat([logits.flatten(1), aux.live.repeat(3, 1), aux.row_loss.unsqueeze(1)], 1))
        outs[impl] = torch.cat(parts, 1)
    assert called, "no row was read in place"
    budget = reordered(124, depth=13)  # two layers of six sums over at most 124 memories, and a head
    torch.testing.assert_close(outs["triton"], outs["chunked"], rtol=budget, atol=budget)
