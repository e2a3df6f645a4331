"""The encoder: tokens in, one prediction for each token out, read from both sides.

Token i is seen by query t, before it or after it, with the weight `clamp(1 + (span_i - |t - i|) / ramp, 0, 1)`: its age is its
distance. Systems that run on the expiring-attention operator can read both ways; those that are built for streams cannot.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from expire_span.model_configs import DecoderConfig

from .decoder import Decoder, DecoderOutput
from .kit.expiring import ExpiringAttention
from .mixer import Keep


class Encoder(Decoder):
    """`logits, _, aux = encoder(tokens)`: embedding, backbone whose layers look both ways, head. It carries no memory."""

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
