"""Checks streams of small models of every kind against a computation without deletion, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.models.systems.expire_span import HeadReach, PaperDetails
from expire_span.settings.run import DecoderConfig, ExpireSpanConfig
from expire_span.stream import Stream

SHAPE: dict[str, Any] = dict(dim=128, layers=2, heads=4, ff_dim=128)
SPANS: dict[str, Any] = dict(max_span=150, ramp=6, initial_span=0.2)
LEAST = 1e-5


def kinds() -> dict[str, DecoderConfig]:
    heads = ExpireSpanConfig(**SPANS, span_per="kv_head")
    reach = HeadReach(learned=True, own_heads=2, spread=3.0, shortest_shared=-4.0)
    paper = PaperDetails(include_self=False, normalizer_eps=1e-8)
    modern = DecoderConfig.modern(**SHAPE)
    return {
        "layer spans": replace(modern, mixer=ExpireSpanConfig(**SPANS)),
        "spans per head": replace(modern, mixer=heads),
        "learned reach": replace(modern, mixer=replace(heads, reach=reach)),
        "spans below zero": replace(modern, mixer=replace(heads, min_span=-5.0)),
        "grouped heads": replace(modern, kv_heads=2, mixer=heads),
        "head gates": replace(modern, head_gates=True, mixer=heads),
        "paper preset": DecoderConfig.paper(**SHAPE, relative_window=16, mixer=ExpireSpanConfig(**SPANS, paper=paper)),
    }


def build(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config).eval()
    for block in decoder.layers():
        torch.nn.init.normal_(block.mixer.span_predictor.weight, std=0.3)  # type: ignore[union-attr]
        gate: Any = block.mixer.head_gate
        if gate is not None:
            torch.nn.init.normal_(gate.weight, std=0.1)
    return decoder


@torch.inference_mode()
def difference(config: DecoderConfig, device: torch.device, steps: int, recorded: bool = True) -> float:
    """The largest difference between a stream's logits (on a GPU with recorded graphs) and those of one pass without
    deletion."""
    decoder = build(config).to(device)
    tokens = torch.randint(256, (3, 30 + steps), generator=torch.Generator().manual_seed(0))
    wanted = decoder.cpu()(tokens, decoder.cpu().initial_state(3, "hidden"))[0][:, 29:]
    decoder = decoder.to(device)
    stream = Stream(decoder, 3, recorded=recorded)
    engine: Any = stream._engine
    engine.read_in_step(dict(enumerate(tokens[:, :30])))
    found: list[Tensor] = [stream.logits.cpu()]
    for token in tokens[:, 30:].unbind(1):
        stream.feed(token)
        found.append(stream.logits.cpu())
    return float((torch.stack(found, 1) - wanted).abs().max())


def largest_differences(device: torch.device, short: bool = False) -> dict[str, float]:
    """The largest difference for each kind of memory, which is also printed."""
    found = {}
    for name, config in list(kinds().items())[: 2 if short else None]:
        found[name] = difference(config, device, 80 if short else 130)
        verdict = "exact" if found[name] <= LEAST else "WRONG"
        print(f"streamed against undeleted, {name}: largest difference {found[name]:.2e}: {verdict}", flush=True)
    return found
