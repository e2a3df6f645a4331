"""The encoder: a bidirectional model that gives one prediction for each token.

Query t sees token i, before it or after it, with the mask `clamp(1 + (span_i - |t - i|) / ramp, 0, 1)`: the age of a memory is
its distance. Only systems that run on the expiring-attention operator can read in both directions.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expire_span.settings.models import DecoderConfig

from .decoder import Decoder, DecoderOutput
from .kit.expiring import ExpiringAttention
from .mixer import Keep


class Encoder(Decoder):
    """`logits, _, aux = encoder(tokens)`: embedding, bidirectional backbone, head. It carries no memory between calls."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for block in self.layers():
            if not isinstance(block.mixer, ExpiringAttention):
                kinds = "expire_span, full, transformer_xl and adaptive_span"
                raise ValueError(f"an encoder looks both ways, which only {kinds} can do, got {config.mixer.kind}")
            block.mixer.look_both_ways()

    def forward(
        self, tokens: Tensor, state: Any = None, fresh: Tensor | None = None, keep: Keep = "nothing"
    ) -> DecoderOutput:
        if state is not None or keep != "nothing":
            raise ValueError(f"an encoder carries no memory from block to block, got keep {keep!r}")
        return super().forward(tokens, None, None, "nothing")
