"""The predictors of lifetimes: e_i = L sigmoid(w . h_i / tau + b), where b may stand for a learned reach z = L sigmoid(b).

A span needs more digits than half precision has, and hidden states in float32 would be written and read once more for it. So
the predictor reads hidden states as the projections beside it do, multiplies and adds in float32, and in compiled
code takes hardly a pass of its own: one row of weights joins the kernel of the norm before, several are one matrix product,
and the gradient goes along with that of the values, or (`shapes_states` off) no further than to the weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.config import ExpireSpanConfig

from .digits import HALVES, split_digits, storage_dtype
from .hold import hold

LEAST = 1e-5
"""The least share of max_span above the shortest span that a head can start with."""
RATE = 50.0
"""How fast reaches are learned: an update by 0.003 changes one by 15%."""
MOST = 30.0
"""What a token's features can add to the logit of its span: enough for any span in any head."""
ALIGNED = 8
"""Columns that a fast matrix product wants in half precision."""


class SpanPredictor(nn.Linear):
    """Reads a hidden state, outputs spans in steps."""

    def __init__(self, dim: int, outputs: int, rules: ExpireSpanConfig) -> None:
        super().__init__(dim, outputs)
        self._obey(rules)
        nn.init.zeros_(self.weight)
        floor = rules.min_span / rules.max_span
        with torch.no_grad():
            shares = [max(share, LEAST + floor) for share in initial_shares(outputs, rules)]
            self.bias.copy_(torch.tensor([_logit((share - floor) / (1 - floor)) for share in shares]))

    def _obey(self, rules: ExpireSpanConfig) -> None:
        self.max_span, self.min_span, self.temperature = rules.max_span, rules.min_span, rules.temperature
        self.shapes_states = rules.shapes_states

    def forward(self, h: Tensor) -> Tensor:
        """h [B, S, C] -> spans [B, outputs, S]."""
        h = h.to(storage_dtype(h))
        h = h if self.shapes_states else h.detach()
        with torch.autocast(h.device.type, enabled=False):
            h = h if h.dtype == torch.float64 else h.float()
            return self._spans(F.linear(h, self.weight / self.temperature))

    def with_values(self, h: Tensor, value: nn.Linear) -> tuple[Tensor, Tensor]:
        """The values' projection of h [B, S, C] and spans [B, outputs, S]; in compiled code with one gradient for both."""
        if not torch.compiler.is_compiling():
            return value(h), self(h)
        h = h.to(storage_dtype(h))
        with torch.autocast(h.device.type, enabled=False):
            project, predict = value.weight.to(h.dtype), self.weight / self.temperature
            if self.shapes_states:
                values, logits = ValuesAndLogits.apply(h, project, predict)  # type: ignore[misc]
            else:
                values, logits = F.linear(h, project), Logits.apply(h.detach(), predict)
            return values, self._spans(logits)

    def _spans(self, product: Tensor) -> Tensor:
        shares = torch.sigmoid(product + self.bias).transpose(1, 2)
        return self.min_span + (self.max_span - self.min_span) * shares


class ReachPredictor(SpanPredictor):
    """Each head learns how far it reaches, z, and `moving` of them share that out: L sigmoid(w . h_i / tau + logit(z / L)).

    This is the bias of the predictor above in steps; a shortest span is added here too. Without w it is Adaptive-Span: a head
    closes, and opens again, by a few updates of one number, where the bias itself takes a thousand. That number is `reach` of
    z = shortest + ramp (e^(RATE reach) - 1): what moves a head that reaches thousands of steps would throw about one that
    reaches ten.
    """

    def __init__(self, dim: int, heads: int, moving: int, rules: ExpireSpanConfig) -> None:
        nn.Linear.__init__(self, dim, moving, bias=False)
        self._obey(rules)
        self.ramp, self.nearest_span = rules.ramp, rules.nearest_span
        shortest = [self.min_span] * moving + [self.nearest_span] * (heads - moving)
        self.furthest = self._scale(self.max_span - min(shortest))
        nn.init.zeros_(self.weight)
        starts = [self.max_span * share for share in initial_shares(heads, rules)]
        self.reach = nn.Parameter(torch.tensor([self._scale(max(z - low, 0.0)) for z, low in zip(starts, shortest)]))

    def _scale(self, steps: float) -> float:
        """A reach beyond the shortest span as it is learned."""
        return math.log1p(steps / self.ramp) / RATE

    def _spans(self, product: Tensor) -> Tensor:
        # Held before tokens share it, so that the sum of their gradients is dropped at the limit, not each that leads outward:
        # the noise of the others would open heads that are to be closed.
        steps = self.ramp * torch.expm1(RATE * hold(self.reach, 0.0, self.furthest)).unsqueeze(1)  # [heads, 1]
        moving, still = steps.split([self.out_features, len(steps) - self.out_features])
        room = self.max_span - self.min_span
        ratio = (moving / room).clamp_max(1.0)
        odds = torch.exp(-product.clamp(-MOST, MOST)).transpose(1, 2)
        own = self.min_span + room * ratio / (ratio + (1 - ratio) * odds)  # also where a ratio is 0, which has no logit
        others = (self.nearest_span + still).clamp_max(self.max_span)
        return torch.cat([own, others.expand(len(product), -1, product.shape[1])], 1)


class ValuesAndLogits(torch.autograd.Function):
    """h [B, S, C], value [V, C] and weight [n, C] -> h . value [B, S, V], and h . weight [B, S, n] in weight's dtype.

    Gradients are matrix products in h's dtype, as those of other weights are, and one product for both: as a further one beside
    those of queries, keys and values, that of h would be written and read once more.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, value: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h, value, weight)
        return h @ value.T, _logits(h, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        h, value, weight = ctx.saved_tensors
        rows, more = h.flatten(0, 1), -len(weight) % ALIGNED
        grads = torch.cat([grad, F.pad(grad_logits, (0, more))], -1).to(h.dtype).flatten(0, 1)
        weights = torch.cat([value, F.pad(weight, (0, 0, 0, more)).to(h.dtype)])
        grad_value, grad_weight = (grads.T @ rows).split([len(value), len(weight) + more])
        return (grads @ weights).view_as(h), grad_value, grad_weight[: len(weight)].to(weight.dtype)


class Logits(torch.autograd.Function):
    """h [B, S, C] and weight [n, C] -> h . weight [B, S, n] in weight's dtype, with a gradient of the weight alone."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return _logits(h, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        (h,) = ctx.saved_tensors
        columns = F.pad(grad, (0, -grad.shape[-1] % ALIGNED)).to(h.dtype).flatten(0, 1)
        return None, (columns.T @ h.flatten(0, 1))[: grad.shape[-1]].to(grad.dtype)


def _logits(h: Tensor, weight: Tensor) -> Tensor:
    """h [B, S, C] . weight [n, C] -> [B, S, n] in weight's dtype."""
    if h.device.type == "cuda" and h.dtype in HALVES and len(weight) > 1:
        return _product_in_float32(h, weight)
    return torch.stack([(h.to(weight.dtype) * row).sum(-1) for row in weight.unbind()], -1)


def _product_in_float32(h: Tensor, weight: Tensor) -> Tensor:
    """Half-precision h [B, S, C] times float32 weight [n, C], exact but for 2^-16 of the weight, which is split in two."""
    halves = F.pad(torch.cat(split_digits(weight, h.dtype, 2)), (0, 0, 0, -2 * len(weight) % ALIGNED))
    both = torch.ops.aten.mm.dtype(h.flatten(0, 1), halves.T, torch.float32)
    return (both[:, : len(weight)] + both[:, len(weight) : 2 * len(weight)]).unflatten(0, h.shape[:2])


def initial_shares(outputs: int, rules: ExpireSpanConfig) -> list[float]:
    """The share of max_span that each head starts with: from the first to the last in equal ratios, longest first."""
    places = [n / (outputs - 1) - 0.5 if outputs > 1 else 0.0 for n in range(outputs)]
    return [rules.initial_span * rules.initial_spread**-place for place in places]


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
