"""Adapters in a model of ours, and training loops that draw or wrap every linear map: what runs is what the modules compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from expire_span import Decoder, ExpireSpan, ExpireSpanConfig, Stream
from expire_span.models.lifetimes import Lifetimes
from tests.stream.test_stream import EXACT, drive, undeleted
from tests.stream_cases import build


class Adapter(nn.Module):
    """A low-rank addition to a layer, as peft makes it: `weight` is that of the layer inside."""

    def __init__(self, inside: nn.Linear | nn.Embedding) -> None:
        super().__init__()
        self.inside = inside
        self.down = nn.Embedding(256, 2) if isinstance(inside, nn.Embedding) else nn.Linear(inside.in_features, 2)
        self.up = nn.Linear(2, 32)

    @property
    def weight(self) -> Tensor:
        return self.inside.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + self.up(self.down(x))


def put_adapter(decoder: Decoder, place: str) -> Decoder:
    """The decoder with an adapter around its embedding, or around one map of every layer."""
    for module in [decoder] if place == "embed" else decoder.layers():
        module.set_submodule(place, Adapter(module.get_submodule(place)))  # type: ignore[arg-type]
    return decoder.eval()


@pytest.mark.parametrize("place", ["mixer.query", "mixer.key", "mixer.value", "mixer.out", "ff.down", "embed"])
def test_streams_run_adapters(place):
    """Steps in place read weights; where an adapter adds to one, they call the modules."""
    decoder = put_adapter(build("layer spans"), place)
    tokens = torch.randint(256, (2, 80))
    stream = Stream(decoder, rows=2)
    stream.read(list(tokens[:, :30]))
    found = drive(stream, tokens[:, 30:])
    torch.testing.assert_close(found, undeleted(decoder, tokens)[:, 30:], rtol=0, atol=EXACT)
    assert stream.static_shapes == (not place.startswith("mixer"))


def test_compiled_values_come_from_the_module():
    torch.manual_seed(0)
    predictor, value, h = Lifetimes(32, 2, ExpireSpanConfig()), Adapter(nn.Linear(32, 32)), torch.randn(2, 5, 32)
    torch._dynamo.reset()
    found, _ = torch.compile(predictor.with_values, backend="eager")(h, value)  # type: ignore[arg-type]
    torch.testing.assert_close(found, value(h))


def test_a_loop_that_draws_all_linear_maps_keeps_the_initial_spans():
    """As nanoGPT does; a bias of zero would give every memory half of the longest span."""

    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    layer = ExpireSpan(32, 2, max_span=100, ramp=4, initial_span=0.1).apply(draw)
    span = layer(torch.randn(1, 3, 32)).aux.span
    torch.testing.assert_close(span, torch.full_like(span, 10.0))
