"""Lifetimes: from hidden states to spans, to the loss that keeps them short, and to the number of living memories.

    e_i = L sigmoid(w . h_i / tau + b)

A `LifetimeRule` knows the number of key/value heads and the ramp, and nothing of the model around it. `build_lifetimes` makes
the learned rule that settings ask for; other systems give every memory the same span (`ConstantLifetimes`), or every head its
own (models/systems/adaptive_span).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.checks import check_count
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.ops import spans_of_heads
from expire_span.ops.live import live_queries, ramp_loss
from expire_span.ops.slots import SpanForm

from .kit.clamp import clamp_with_recovery
from .kit.fused_logits import Logits, ValuesAndLogits
from .kit.precision import storage_dtype

LEAST_SHARE = 1e-5
"""The smallest initial span of a head, as a share of max_span above its shortest span."""
REACH_RATE = 50.0
"""How fast a learned reach moves: an update of its parameter by 0.003 changes it by 15%."""
MOST_LOGIT = 30.0
"""Limit of what a token's hidden state can add to the logit of its span; it allows any span in any head."""


class LifetimeRule(nn.Module):
    """Spans [B, P, S] for hidden states [B, S, C]. With P < kv_heads, the last row of spans is shared by all further heads."""

    kv_heads: int
    ramp: float
    include_self: bool = True
    causal: bool = True
    """Off, a memory is alive within its span on either side."""
    reports_spans: bool = True
    """Whether spans are worth reporting; off where nothing ever expires."""

    @property
    def per_head(self) -> bool:
        """Whether heads have different spans, so that a store of keys and values needs a row for each head."""
        return False

    def with_values(self, h: Tensor, value: nn.Linear) -> tuple[Tensor, Tensor]:
        """The values' projection of h [B, S, C], and spans [B, P, S]."""
        return value(h), self(h)

    def by_head(self, h: Tensor) -> Tensor:
        """Spans [B, Hkv, S] where heads differ, else [B, 1, S]."""
        return spans_of_heads(self(h), self.kv_heads)

    def span_form(self, dim: int) -> SpanForm | None:
        """The rule for hidden states of `dim` numbers as a `SpanForm`, or None where it has none."""
        return None

    def limit_noisily(self, span: Tensor) -> Tensor:
        """Spans as attention sees them in this forward pass; deletion always uses those that `forward` gave."""
        return span

    def loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor | None:
        """The span loss of a block of `count` tokens from position `start` on, for each row [B].

        span [B, P, S] and k_pos [.., S] are of all memories that the block reads; the block's own come last.
        """
        return None

    def live(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        """Mean number of living memories per query of the block, a scalar."""
        where = (span.detach(), k_pos, start, start + count - 1)
        if self.causal:
            alive = live_queries(*where, ramp=self.ramp, include_self=self.include_self)
        else:
            alive = live_both_ways(*where, ramp=self.ramp)
        return self.mean_over_heads(alive.sum(-1)).mean() / count

    def mean_over_heads(self, x: Tensor) -> Tensor:
        """The mean over heads [B] of one number per row of spans [B, P]; the last row stands for all heads that share it."""
        rows, heads = x.shape[1], self.kv_heads
        if rows in (1, heads):
            return x.mean(1)
        return (x[:, :-1].sum(1) + (heads - rows + 1) * x[:, -1]) / heads


class ConstantLifetimes(LifetimeRule):
    """Every memory gets the same span."""

    def __init__(self, kv_heads: int, span: int, *, ramp: float = 1, reports_spans: bool = True) -> None:
        super().__init__()
        self.kv_heads, self.span, self.ramp, self.reports_spans = kv_heads, span, ramp, reports_spans

    def forward(self, h: Tensor) -> Tensor:
        dtype = torch.promote_types(h.dtype, torch.float32)
        return torch.full((h.shape[0], 1, h.shape[1]), float(self.span), dtype=dtype, device=h.device)

    def span_form(self, dim: int) -> SpanForm:
        return SpanForm.constant(torch.full((self.kv_heads,), float(self.span)), dim)


class Lifetimes(LifetimeRule, nn.Linear):
    """Learned spans: a linear map of the hidden state, a sigmoid, and max_span."""

    def __init__(self, dim: int, kv_heads: int, settings: ExpireSpanConfig) -> None:
        check_count("dim", dim)
        check_count("kv_heads", kv_heads)
        nn.Linear.__init__(self, dim, num_outputs(kv_heads, settings))
        self._adopt(kv_heads, settings)
        nn.init.zeros_(self.weight)
        floor = settings.min_span / settings.max_span
        with torch.no_grad():
            shares = [max(share, LEAST_SHARE + floor) for share in initial_shares(self.out_features, settings)]
            self.bias.copy_(torch.tensor([_logit((share - floor) / (1 - floor)) for share in shares]))

    def _adopt(self, kv_heads: int, settings: ExpireSpanConfig) -> None:
        self.kv_heads, self.ramp, self.settings = kv_heads, settings.ramp, settings
        self.include_self = settings.paper.include_self
        self.max_span, self.min_span, self.temperature = settings.max_span, settings.min_span, settings.temperature

    @property
    def per_head(self) -> bool:
        return self.settings.span_per == "kv_head"

    def forward(self, h: Tensor) -> Tensor:
        h = h.to(storage_dtype(h))
        h = h.detach() if self.settings.reach.stop_gradient else h
        with torch.autocast(h.device.type, enabled=False):
            h = h if h.dtype == torch.float64 else h.float()
            return self._spans(F.linear(h, self._scaled_weight().to(h.dtype)))

    def with_values(self, h: Tensor, value: nn.Linear) -> tuple[Tensor, Tensor]:
        """In compiled code both come with one gradient, which saves a pass over the hidden states."""
        if not torch.compiler.is_compiling():
            return value(h), self(h)
        h = h.to(storage_dtype(h))
        with torch.autocast(h.device.type, enabled=False):
            project, predict = value.weight.to(h.dtype), self._scaled_weight()
            if self.settings.reach.stop_gradient:
                values, logits = F.linear(h, project), Logits.apply(h.detach(), predict)
            else:
                values, logits = ValuesAndLogits.apply(h, project, predict)  # type: ignore[misc]
            return values, self._spans(logits)

    def _scaled_weight(self) -> Tensor:
        """The predictor's weight over its temperature, in float32 or better whatever the dtype of the model."""
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) / self.temperature

    def _spans(self, product: Tensor) -> Tensor:
        shares = torch.sigmoid(product + self.bias.to(product.dtype)).transpose(1, 2)
        return self.min_span + (self.max_span - self.min_span) * shares

    @torch.no_grad()
    def span_form(self, dim: int) -> SpanForm | None:
        row = torch.arange(self.kv_heads, device=self.weight.device).clamp(max=self.out_features - 1)
        low = torch.full((self.kv_heads,), float(self.min_span), device=row.device)
        return SpanForm(self._scaled_weight().float()[row], self.bias.float()[row], low, self.max_span - low)

    def limit_noisily(self, span: Tensor) -> Tensor:
        """In training with `noisy`, one random limit for all spans of a forward pass."""
        if not (self.training and self.settings.paper.noisy):
            return span
        return torch.minimum(span, torch.rand((), device=span.device) * self.max_span)

    def loss(self, span: Tensor, k_pos: Tensor, start: int, count: int) -> Tensor:
        if self.settings.span_loss == "l1":
            return self.mean_over_heads(span[..., -count:].mean(-1))
        charged = ramp_loss(span, k_pos, start, start + count - 1, ramp=self.ramp)
        return self.mean_over_heads(charged) / count


class ReachLifetimes(Lifetimes):
    """Each head learns its reach z, its average span in steps; `own_heads` of them distribute it over tokens.

        e_i = L sigmoid(w . h_i / tau + logit(z / L))

    This is the bias of `Lifetimes` in steps. Without w it is Adaptive-Span: a head closes, and opens again, by a few updates
    of one number, where the bias itself would take a thousand. The parameter is `reach` in z = shortest + ramp (e^(50 reach)
    - 1): a logarithmic scale, since an update that suits a head of thousands of steps would be far too large for a head of
    ten.
    """

    def __init__(self, dim: int, kv_heads: int, settings: ExpireSpanConfig) -> None:
        own = num_own_heads(kv_heads, settings)
        nn.Linear.__init__(self, dim, own, bias=False)
        self._adopt(kv_heads, settings)
        self.shortest_shared = settings.shortest_shared
        shortest = [self.min_span] * own + [self.shortest_shared] * (kv_heads - own)
        self.furthest = self._scale(self.max_span - min(shortest))
        nn.init.zeros_(self.weight)
        starts = [self.max_span * share for share in initial_shares(kv_heads, settings)]
        self.reach = nn.Parameter(torch.tensor([self._scale(max(z - low, 0.0)) for z, low in zip(starts, shortest)]))

    def _scale(self, steps: float) -> float:
        """The value of the parameter for a reach of `steps` beyond the shortest span."""
        return math.log1p(steps / self.ramp) / REACH_RATE

    def _spans(self, product: Tensor) -> Tensor:
        # The parameter is clamped, not each token's span: at the limit the sum of the tokens' gradients is dropped if it points
        # outward. Dropping single outward gradients would bias the sum inward, and open heads that training wants closed.
        reach = clamp_with_recovery(self.reach.to(product.dtype), 0.0, self.furthest)
        steps = self.ramp * torch.expm1(REACH_RATE * reach).unsqueeze(1)  # [heads, 1]
        own, shared = steps.split([self.out_features, len(steps) - self.out_features])
        room = self.max_span - self.min_span
        ratio = (own / room).clamp_max(1.0)
        odds = torch.exp(-product.clamp(-MOST_LOGIT, MOST_LOGIT)).transpose(1, 2)
        of_tokens = self.min_span + room * ratio / (
            ratio + (1 - ratio) * odds
        )  # a ratio of 0, without a logit, works too
        of_heads = (self.shortest_shared + shared).clamp_max(self.max_span)
        return torch.cat([of_tokens, of_heads.expand(len(product), -1, product.shape[1])], 1)

    @torch.no_grad()
    def span_form(self, dim: int) -> SpanForm:
        steps = self.ramp * torch.expm1(REACH_RATE * self.reach.double().clamp(0.0, self.furthest))
        own, room = self.out_features, float(self.max_span - self.min_span)
        form = SpanForm.constant((self.shortest_shared + steps).clamp_max(self.max_span).float(), dim)
        form.weight[:own] = self._scaled_weight().float()
        form.bias[:own] = torch.logit((steps[:own] / room).clamp_max(1.0)).float()
        form.low[:own] = self.min_span
        form.room[:own] = room
        return form


def live_both_ways(span: Tensor, pos: Tensor, first: int, last: int, *, ramp: float) -> Tensor:
    """For how many of the queries first..last, on either side, each memory is alive. span, pos [.., S] -> [.., S].

    Queries before a memory are counted by mirroring all positions.
    """
    after = live_queries(span, pos, first, last, ramp=ramp, include_self=True)
    before = live_queries(span, -pos, -last, -first, ramp=ramp, include_self=False)
    return after + before


def build_lifetimes(dim: int, kv_heads: int, settings: ExpireSpanConfig) -> Lifetimes:
    """The learned rule that settings ask for."""
    return (ReachLifetimes if settings.reach.learned else Lifetimes)(dim, kv_heads, settings)


def num_own_heads(kv_heads: int, settings: ExpireSpanConfig) -> int:
    """Number of heads that give each token a span of its own."""
    own = settings.reach.own_heads
    return kv_heads if own is None else min(own, kv_heads)


def num_outputs(kv_heads: int, settings: ExpireSpanConfig) -> int:
    """Rows of spans that a predictor gives: one for the layer; or one for each head with own spans, and one for all others."""
    return 1 if settings.span_per == "layer" else min(num_own_heads(kv_heads, settings) + 1, kv_heads)


def initial_shares(outputs: int, settings: ExpireSpanConfig) -> list[float]:
    """The share of max_span that each head starts with: from the first to the last in equal ratios, longest first."""
    places = [n / (outputs - 1) - 0.5 if outputs > 1 else 0.0 for n in range(outputs)]
    return [settings.initial_span * settings.reach.spread**-place for place in places]


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
