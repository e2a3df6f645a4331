"""An encoder whose tokens expire: the decoder's skeleton with mixers that look both ways.

Token i is seen by query t, before it or after it, with the weight `clamp(1 + (span_i - |t - i|) / ramp, 0, 1)`: its age is
its distance. The operator does this with `causal=False`; here are only the mixers around it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.config import DecoderConfig
from expire_span.models.decoder import Decoder
from expire_span.models.expire_span import ExpireSpan
from expire_span.models.full import Full
from expire_span.models.mixer import Mixer
from expire_span.models.transformer_xl import TransformerXL
from expire_span.ops import expire_attention
from expire_span.ops.live import live_queries


def live_both_ways(span: Tensor, pos: Tensor, first: int, last: int, *, ramp: float) -> Tensor:
    """For how many of the queries first..last, on either side, each token is alive. span, pos [.., S] -> [.., S].

    The queries before a token are those after it in the mirror.
    """
    after = live_queries(span, pos, first, last, ramp=ramp, include_self=True)
    before = live_queries(span, -pos, -last, -first, ramp=ramp, include_self=False)
    return after + before


class SpansBothWays(ExpireSpan):
    """Every token predicts how far away it can be read, on both sides."""

    def _attend(self, x: Tensor, k: Tensor, v: Tensor, span: Tensor, pos: Tensor, k_pos: Tensor) -> Tensor:
        q = self._place(self._split(self.query(x)), pos)
        y = expire_attention(q, k, v, span.squeeze(1), pos, k_pos, ramp=self.mixer.ramp, causal=False)
        return self._finish(y)

    def _live(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        alive = live_both_ways(span.detach(), k_pos, start, start + count - 1, ramp=self.mixer.ramp)
        return alive.sum(-1).mean() / count


class WindowBothWays(SpansBothWays):
    """Every token can be read from less than `span` steps away, on either side: nothing is learned."""

    rules, build_predictor, _span_loss = TransformerXL.rules, TransformerXL.build_predictor, TransformerXL._span_loss


class FullBothWays(Full):
    """Every token is read from everywhere: torch's fused attention."""

    def _attend(self, x: Tensor, k: Tensor, v: Tensor, span: Tensor, pos: Tensor, k_pos: Tensor) -> Tensor:
        q = self._place(self._split(self.query(x)), pos)
        return self._finish(F.scaled_dot_product_attention(q, k, v))

    def _live(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        return torch.tensor(float(count), device=span.device)


def with_mixers(decoder: Decoder, build: Callable[[DecoderConfig, int], Mixer]) -> Decoder:
    """The same decoder, weight for weight, with another mixer in every block."""
    for layer, block in enumerate(decoder.layers()):
        mixer = build(decoder.config, layer)
        mixer.load_state_dict(block.mixer.state_dict())
        block.mixer = mixer
    return decoder


BOTH_WAYS: dict[str, Callable[[DecoderConfig, int], Mixer]] = {
    "expire_span": SpansBothWays,
    "transformer_xl": WindowBothWays,
    "full": FullBothWays,
}
"""The mixer that looks both ways, for each kind that only looks back."""


def build_encoder(config: DecoderConfig) -> Decoder:
    """Tokens [B, T] -> label logits [B, T, V], every token read from both sides."""
    return with_mixers(Decoder(config), BOTH_WAYS[config.mixer.kind])
