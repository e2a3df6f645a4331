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
from .kit.plain import are_plain
from .kit.precision import storage_dtype

LEAST_SHARE = 1e-5
"""Least amount, as a share of max_span, by which a head's initial span exceeds its shortest span: a sigmoid is never 0."""
REACH_RATE = 50.0
"""Scale of a learned reach's parameter: changing the parameter by 0.003 changes the reach by about 15%."""
MOST_LOGIT = 30.0
"""Limit on what a token's hidden state can add to the logit of its span. It is so wide that every span stays possible."""


class LifetimeRule(nn.Module):
    """Maps hidden states [B, S, C] to spans [B, P, S] in steps. P is 1 where all key/value heads share their spans, or the
    number of heads, or between: then the first P - 1 heads have spans of their own, and all further heads share the last row.
    """

    kv_heads: int
    ramp: float
    include_self: bool = True
    causal: bool = True
    """False for encoders: the age of a memory is then its distance, before or after the query."""
    reports_spans: bool = True
    """Whether `MixerAux.span` is filled; False where nothing ever expires."""

    @property
    def per_head(self) -> bool:
        """Whether heads have different spans, so that a store of keys and values needs a row for each head."""
        return False

    def with_values(self, h: Tensor, value: nn.Linear) -> tuple[Tensor, Tensor]:
        """For hidden states h [B, S, C], the product value(h) and the spans [B, P, S]."""
        return value(h), self(h)

    def by_head(self, h: Tensor) -> Tensor:
        """Spans [B, Hkv, S] where heads differ, else [B, 1, S]."""
        return spans_of_heads(self(h), self.kv_heads)

    def span_form(self, dim: int) -> SpanForm | None:
        """This rule for hidden states of width `dim` as the `SpanForm` that decoding over slots needs; None if it has no such
        form."""
        return None

    def limit_noisily(self, span: Tensor) -> Tensor:
        """Spans that attention uses in this forward pass. Deletion always uses the unlimited ones that `forward` gave."""
        return span

    def loss(self, span: Tensor, k_pos: Tensor, start: int, count: int, queries: int | None = None) -> Tensor | None:
        """The span loss of a block of `count` tokens from position `start` on, for each row [B].

        span [B, P, S] and k_pos [.., S] are of all memories that the block reads; the block's own come last. queries: where a
        block is read in parts of `count` tokens, the number of tokens of all parts, with `start` that of the block: the mean
        over all parts, each with its own memories, is then the loss of the whole block.
        """
        return None

    def live(self, span: Tensor, k_pos: Tensor, start: int, count: int, queries: int | None = None) -> Tensor:
        """Mean number of living memories per query of the block, a scalar; for `queries` see `loss`."""
        where = (span.detach(), k_pos, start, start + (queries or count) - 1)
        if self.causal:
            alive = live_queries(*where, ramp=self.ramp, include_self=self.include_self)
        else:
            alive = live_both_ways(*where, ramp=self.ramp)
        return self.mean_over_heads(alive.sum(-1)).mean() / count

    def mean_over_heads(self, x: Tensor) -> Tensor:
        """Average x [B, P], one number per row of spans, over heads: [B]. The last row counts for all heads that share it."""
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


class Lifetimes(LifetimeRule):
    """Learned spans: max_span times the sigmoid of a linear map of the hidden state (from min_span up, where that is set).

    It is no `nn.Linear`: code that draws every linear map's weights anew or wraps it in an adapter, as many training loops do,
    would replace the initial spans.
    """

    weight: nn.Parameter
    bias: nn.Parameter

    def __init__(self, dim: int, kv_heads: int, settings: ExpireSpanConfig) -> None:
        super().__init__()
        check_count("dim", dim)
        check_count("kv_heads", kv_heads)
        self._take(nn.Linear(dim, num_outputs(kv_heads, settings)))
        self._adopt(kv_heads, settings)
        floor = settings.min_span / settings.max_span
        with torch.no_grad():
            shares = [max(share, LEAST_SHARE + floor) for share in initial_shares(self.out_features, settings)]
            self.bias.copy_(torch.tensor([_logit((share - floor) / (1 - floor)) for share in shares]))

    def _take(self, linear: nn.Linear) -> None:
        """Take the parameters of a linear map, the weight set to zero. Drawing one keeps the meaning of a seed: models made
        from it have had one here from the beginning."""
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(torch.zeros_like(linear.weight))
        self.register_parameter("bias", linear.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

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
        """In compiled code, the gradients of both to h are one matrix product, which saves a pass over the hidden states."""
        if not torch.compiler.is_compiling() or not are_plain(value):
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

    def loss(self, span: Tensor, k_pos: Tensor, start: int, count: int, queries: int | None = None) -> Tensor:
        if self.settings.span_loss == "l1":
            return self.mean_over_heads(span[..., -count:].mean(-1))
        charged = ramp_loss(span, k_pos, start, start + (queries or count) - 1, ramp=self.ramp)
        return self.mean_over_heads(charged) / count


class ReachLifetimes(Lifetimes):
    """Each head learns its reach z, its average span in steps; `own_heads` of them distribute it over tokens.

        e_i = L sigmoid(w . h_i / tau + logit(z / L))

    So z replaces the bias of `Lifetimes` by a number in steps. The heads beyond `own_heads` have no w and give every token the
    span z, as in Adaptive-Span. A head can close and open again within a few updates of this one number, where the bias itself
    would take a thousand. The learned parameter is `reach` in z = shortest + ramp (e^(50 reach) - 1). This is a logarithmic
    scale, since an update that suits a head of thousands of steps would be far too large for a head of ten.
    """

    def __init__(self, dim: int, kv_heads: int, settings: ExpireSpanConfig) -> None:
        LifetimeRule.__init__(self)
        own = num_own_heads(kv_heads, settings)
        self._take(nn.Linear(dim, own, bias=False))
        self._adopt(kv_heads, settings)
        self.shortest_shared = settings.shortest_shared
        shortest = [self.min_span] * own + [self.shortest_shared] * (kv_heads - own)
        self.furthest = self._scale(self.max_span - min(shortest))
        starts = [self.max_span * share for share in initial_shares(kv_heads, settings)]
        self.reach = nn.Parameter(torch.tensor([self._scale(max(z - low, 0.0)) for z, low in zip(starts, shortest)]))

    def _scale(self, steps: float) -> float:
        """The value of the parameter for a reach of `steps` beyond the shortest span."""
        return math.log1p(steps / self.ramp) / REACH_RATE

    def _spans(self, product: Tensor) -> Tensor:
        # The parameter is clamped, not each token's span: at the limit the sum of the tokens' gradients is dropped if it points
        # outward. Dropping single outward gradients would bias the sum inward, and open heads that training wants closed.
        reach = clamp_with_recovery(self.reach, 0.0, self.furthest).to(product.dtype)
        steps = self.ramp * torch.expm1(REACH_RATE * reach).unsqueeze(1)  # [heads, 1]
        own, shared = steps.split([self.out_features, len(steps) - self.out_features])
        room = self.max_span - self.min_span
        ratio = (own / room).clamp_max(1.0)
        odds = torch.exp(-product.clamp(-MOST_LOGIT, MOST_LOGIT)).transpose(1, 2)
        # sigmoid(product + logit(ratio)), written so that a ratio of 0, whose logit is infinite, gives 0 without NaN.
        of_tokens = self.min_span + room * ratio / (ratio + (1 - ratio) * odds)
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
    """For how many of the queries first..last each memory is alive in an encoder. span, pos [.., S] -> [.., S].

    Queries before a memory are counted by the causal function with all positions negated.
    """
    after = live_queries(span, pos, first, last, ramp=ramp, include_self=True)
    before = live_queries(span, -pos, -last, -first, ramp=ramp, include_self=False)
    return after + before


def build_lifetimes(dim: int, kv_heads: int, settings: ExpireSpanConfig) -> Lifetimes:
    """The learned rule that the settings select."""
    return (ReachLifetimes if settings.reach.learned else Lifetimes)(dim, kv_heads, settings)


def num_own_heads(kv_heads: int, settings: ExpireSpanConfig) -> int:
    """Number of heads that give each token a span of its own."""
    own = settings.reach.own_heads
    return kv_heads if own is None else min(own, kv_heads)


def num_outputs(kv_heads: int, settings: ExpireSpanConfig) -> int:
    """Number P of rows of spans that a predictor gives: 1 with span_per=layer; else one for each head with spans of its own,
    and one more for all other heads together."""
    return 1 if settings.span_per == "layer" else min(num_own_heads(kv_heads, settings) + 1, kv_heads)


def initial_shares(outputs: int, settings: ExpireSpanConfig) -> list[float]:
    """The share of max_span that each row of spans starts with: a geometric sequence around initial_span, longest first."""
    places = [n / (outputs - 1) - 0.5 if outputs > 1 else 0.0 for n in range(outputs)]
    return [settings.initial_span * settings.reach.spread**-place for place in places]


def _logit(share: float) -> float:
    return math.log(share / (1 - share))
