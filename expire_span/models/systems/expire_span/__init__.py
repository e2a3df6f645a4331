"""Expire-Span: settings and declaration of learned expiry, the system that this package is named after."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from expire_span.checks import Bound, Count, Natural, NonNegative, Positive, at_least, checked, require
from expire_span.field_docs import documented
from expire_span.models.systems.contract import Budget, MemorySystem


@documented
@dataclass(frozen=True)
@checked
class PaperDetails:
    """Details of the paper's released code that most users leave alone."""

    include_self: bool = True
    """Whether a token attends to itself (the paper's does not)."""
    noisy: bool = False
    """In training, clamp all spans to one random fraction of max_span per forward pass; deletion uses the unclamped spans."""
    initial_memories: Natural = 0
    """Number of zero vectors that the memory holds before the first token (the released code starts with a block of them)."""
    normalizer_eps: NonNegative = 0.0
    """Added to the attention normaliser, in units of the sum of the living memories' unmasked weights (released code: 1e-8)."""


@documented
@dataclass(frozen=True)
@checked
class HeadReach:
    """How the spans of a layer's heads differ; needs span_per=kv_head."""

    learned: bool = False
    """Let each head learn its average span in steps, as Adaptive-Span does; `own_heads` of them distribute it over tokens, the
    others give every token the same span. Off, a head's average span follows from the predictor's bias."""
    own_heads: Count | None = None
    """Number of heads that give each token a span of its own; all others share one more. None is all heads."""
    spread: Annotated[float, at_least(1)] = 1.0
    """Ratio of the longest to the shortest initial span of a layer's heads, which form a geometric sequence around
    initial_span."""
    shortest_shared: float | None = None
    """With learned: the shortest span of the heads beyond own_heads; None is min_span."""
    stop_gradient: bool = False
    """Stop the span predictor's gradient at the hidden states that it reads: it trains its own weights only, and costs less."""

    def __post_init__(self) -> None:
        usable = self.shortest_shared is None or (self.learned and self.own_heads is not None)
        given = f"learned and own_heads, got learned {self.learned} and own_heads {self.own_heads}"
        require(usable, f"shortest_shared is of heads beyond own_heads and needs {given}")


@documented
@dataclass(frozen=True)
@checked
class ExpireSpanConfig:
    """Learned expiry: each memory gets, at birth, a span after which it fades out and is deleted."""

    kind: Literal["expire_span"] = "expire_span"
    max_span: Count = 1024
    """Longest span a memory can be given, in steps (L)."""
    ramp: Annotated[int, Bound("be greater than 0", lambda x: x > 0)] = 32
    """Soft edge of the mask, in steps (R). Only memories on the ramp send gradient to the span predictor."""
    initial_span: Annotated[float, Bound("be a share of max_span above 0 and below 1", lambda x: 0 < x < 1)] = 0.1
    """Share of max_span that every memory gets before training (p)."""
    min_span: float = 0.0
    """Shortest span that can be predicted, in steps. Below 0, memories may be born on their ramp and live for less than it; at
    -ramp they would be born dead."""
    temperature: Positive = 1.0
    """Divides the predictor's logit w . h (tau); above 1 it keeps one optimizer step from moving spans by thousands of
    steps."""
    span_per: Literal["layer", "kv_head"] = "layer"
    """One span per memory shared by all heads of the layer, or one for each key/value head."""
    span_loss: Literal["ramp", "l1"] = "ramp"
    """What the loss counts: ramp, memories while they are on their ramp (the released code's form); l1, the mean span at
    birth."""
    cap: Count | None = None
    """Hard limit on stored memories per row: those with the fewest steps left are evicted, and counted. None: no limit."""
    subtract_own: bool = False
    """Subtract from each head's output its projection on the token's own value, so that heads tell what other tokens say."""
    impl: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """Implementation of the operator; auto takes triton on a GPU and chunked elsewhere."""
    reach: HeadReach = field(default_factory=HeadReach)
    """How the spans of a layer's heads differ."""
    paper: PaperDetails = field(default_factory=PaperDetails)
    """Details of the paper's released code."""

    def __post_init__(self) -> None:
        longest = self.initial_span * self.reach.spread**0.5
        require(longest < 1, f"initial_span x sqrt(reach.spread) must lie below 1, got {longest:g}")
        self._check_heads()
        for name, span in (("min_span", self.min_span), ("reach.shortest_shared", self.reach.shortest_shared)):
            limits = f"between -ramp and max_span, {-self.ramp} and {self.max_span}"
            require(span is None or -self.ramp < span < self.max_span, f"{name} must lie {limits}, got {span}")

    def _check_heads(self) -> None:
        r = self.reach
        apart = {"reach.spread": r.spread != 1, "reach.own_heads": r.own_heads is not None, "reach.learned": r.learned}
        for name, used in apart.items():
            needs = f"{name} sets heads apart and needs span_per kv_head, got span_per {self.span_per}"
            require(not used or self.span_per == "kv_head", needs)

    @property
    def shortest_shared(self) -> float:
        """The shortest span of heads beyond own_heads."""
        return self.min_span if self.reach.shortest_shared is None else self.reach.shortest_shared


SYSTEM = MemorySystem(
    ExpireSpanConfig,
    "expire_span.models.systems.expire_span.layer:ExpireSpan",
    state="living memories x (2 Hkv D e + 12), at most max_span + ramp of them",
    held=lambda s, n: min(n, s.settings.max_span + s.settings.ramp, s.settings.cap or n) * (s.pair + 12),
    cost="O(T x living)",
    budget=Budget("the budget controller holds the mean of living memories", lambda recipe, n: recipe.settings),
    streaming="exact; under a cap, evictions are counted",
    training="with a cap, memories that the cap would have evicted",
    receptive_field=lambda s: s.settings.max_span + s.settings.ramp - 1,
    learns_spans=True,
    operator=True,
    example={"max_span": 30, "ramp": 4, "initial_span": 0.3},
)
