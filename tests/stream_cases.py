"""Small decoders for the tests of streams, one for each way in which memories are kept."""

from __future__ import annotations

from dataclasses import replace

import torch

from expire_span.models.decoder import Decoder
from expire_span.models.systems.expire_span import HeadReach, PaperDetails
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig

SHAPE = dict(dim=32, layers=2, heads=4, ff_dim=32)
SPANS = dict(max_span=90, ramp=6, initial_span=0.2)
PER_HEAD = dict(**SPANS, span_per="kv_head")
REACH = HeadReach(learned=True, own_heads=2, spread=3.0, shortest_shared=-4.0)

CASES = {
    "layer spans": DecoderConfig.modern(**SHAPE, mixer=ExpireSpanConfig(**SPANS)),
    "spans per head": DecoderConfig.modern(**SHAPE, mixer=ExpireSpanConfig(**PER_HEAD, reach=HeadReach(spread=4.0))),
    "learned reach": DecoderConfig.modern(**SHAPE, mixer=ExpireSpanConfig(**PER_HEAD, reach=REACH)),
    "spans below zero": DecoderConfig.modern(**SHAPE, mixer=ExpireSpanConfig(**PER_HEAD, min_span=-5.0)),
    "cap": DecoderConfig.modern(**SHAPE, mixer=ExpireSpanConfig(**SPANS, cap=9)),
    "grouped heads with gates, no own values": DecoderConfig.modern(
        **SHAPE, kv_heads=2, head_gates=True, mixer=ExpireSpanConfig(**PER_HEAD, subtract_own=True)
    ),
    "paper preset": DecoderConfig.paper(
        **SHAPE,
        relative_window=16,
        mixer=ExpireSpanConfig(
            **SPANS, paper=PaperDetails(include_self=False, normalizer_eps=1e-8, initial_memories=5)
        ),
    ),
}


def build(case: str | DecoderConfig, seed: int = 0) -> Decoder:
    """The decoder of a case, with spans that differ from token to token."""
    torch.manual_seed(seed)
    decoder = Decoder(CASES[case] if isinstance(case, str) else case).eval()
    for block in decoder.layers():
        weight = getattr(getattr(block.mixer, "span_predictor", None), "weight", None)
        if weight is not None:
            torch.nn.init.normal_(weight, std=0.5)
        gate = getattr(block.mixer, "head_gate", None)
        if gate is not None:
            torch.nn.init.normal_(gate.weight, std=0.3)
            torch.nn.init.normal_(gate.bias)
    return decoder


def without_initial(config: DecoderConfig) -> DecoderConfig:
    mixer = config.mixer
    return replace(config, mixer=replace(mixer, paper=replace(mixer.paper, initial_memories=0)))
