"""Expire-Span: attention over memories whose lifetimes are predicted when they are written.

    e_i = L sigmoid(w . h_i / tau + b),  m_ti = clamp(1 + (e_i - (t - i)) / R, 0, 1)

Differences from the paper: spans per key/value head, a learned average span per head, a hard cap and the L1 form of the loss
are options; dropout acts on the layer's output instead of the attention weights; with pre-norm, memories are stored after the
norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from expire_span.models.kit.expiring import ExpiringAttention, ExpiryRules
from expire_span.models.lifetimes import Lifetimes, build_lifetimes
from expire_span.models.systems.expire_span import ExpireSpanConfig

if TYPE_CHECKING:
    from torch import nn

    from expire_span.models.systems.expire_span import HeadReach, PaperDetails


class ExpireSpan(ExpiringAttention):
    """`ExpireSpan(dim, heads, kv_heads=None, max_span=1024, ramp=32, ...)`: `y, state, aux = layer(x, state)`.

    Keyword arguments are the fields of `ExpireSpanConfig`, and `positions`, `qk_norm`, `head_gates`, `rotary_base`,
    `relative_window`. Add `weight * aux.loss.mean()` to the training loss to keep spans short.
    """

    settings_class = ExpireSpanConfig
    settings: ExpireSpanConfig

    # What type checkers and the API reference show. At run time, `Mixer.__init__` takes the same options from the settings.
    if TYPE_CHECKING:

        def __init__(
            self,
            dim: int,
            heads: int = 1,
            kv_heads: int | None = None,
            *,
            max_span: int = 1024,
            ramp: int = 32,
            initial_span: float = 0.1,
            min_span: float = 0.0,
            temperature: float = 1.0,
            span_per: Literal["layer", "kv_head"] = "layer",
            span_loss: Literal["ramp", "l1"] = "ramp",
            cap: int | None = None,
            subtract_own: bool = False,
            impl: Literal["auto", "reference", "chunked", "triton"] = "auto",
            reach: HeadReach = HeadReach(),  # noqa: B008 (it is frozen)
            paper: PaperDetails = PaperDetails(),  # noqa: B008
            positions: Literal["rotary", "relative", "none"] = "rotary",
            relative_window: int = 256,
            rotary_base: float = 10_000.0,
            qk_norm: bool = True,
            head_gates: bool = False,
            depth: int = 0,
            settings: ExpireSpanConfig | None = None,
            relative_keys: nn.Parameter | None = None,
        ) -> None: ...

    def build_lifetimes(self) -> Lifetimes:
        return build_lifetimes(self.shape.dim, self.shape.num_kv_heads, self.settings)

    def build_rules(self) -> ExpiryRules:
        s, paper = self.settings, self.settings.paper
        return ExpiryRules(
            s.cap, paper.include_self, paper.initial_memories, paper.normalizer_eps, s.impl, subtract_own=s.subtract_own
        )
