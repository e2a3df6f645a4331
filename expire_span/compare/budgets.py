"""The memory knob of every system: how a recipe becomes a run of another memory system, held to so many memories.

`RULES` is the one table. A rule takes the recipe's own run and a number of memories and returns the system's config; systems
without a knob have none and give one point of a sweep. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from expire_span.config import BudgetConfig, RunConfig
from expire_span.mixer_configs import (
    AdaptiveSpanConfig,
    BigBirdConfig,
    CompressiveConfig,
    ExpireSpanConfig,
    LongformerConfig,
    PerformerConfig,
    ReformerConfig,
    RoutingConfig,
    SlidingWindowConfig,
    StreamingSinksConfig,
    TransformerXLConfig,
    mixer_config,
)
from expire_span.runs import UserError

LEARNED = ("expire_span", "adaptive_span")
"""Systems that learn how long to remember: training presses them towards a budget."""
DEFAULT_SHARE = 16
"""Where a recipe names no budget, memories of a fixed number get its longest span over this."""


@dataclass(frozen=True)
class Rule:
    """How one system spends a number of memories."""

    knob: str
    """What is set, in words."""
    mixer: Callable[[RunConfig, Any], Any] | None = None
    """The mixer's config for so many memories; None where nothing can be set."""


def reach(config: RunConfig) -> ExpireSpanConfig:
    """The learned spans that a recipe allows: its own, or the defaults where it has another memory."""
    mixer = config.model.mixer
    return mixer if isinstance(mixer, ExpireSpanConfig) else ExpireSpanConfig()


def default_memories(config: RunConfig) -> int:
    """Memories of a system with a fixed number of them: the recipe's budget, or a share of its longest span."""
    live = config.train.budget.live
    return max(1, round(live)) if live is not None else max(1, reach(config).max_span // DEFAULT_SHARE)


def _adaptive(config: RunConfig, memories: int | None) -> AdaptiveSpanConfig:
    """Heads may reach as far as the recipe's spans; held to a budget, all start there."""
    m = reach(config)
    start = m.initial_span if memories is None else min(memories / m.max_span, 1.0)
    return AdaptiveSpanConfig(max_span=m.max_span, ramp=m.ramp, initial_span=start)


def _compressive(config: RunConfig, memories: int) -> CompressiveConfig:
    window = max(1, memories // 2)
    return CompressiveConfig(window=window, compressed=max(1, memories - window))


def _longformer(config: RunConfig, memories: int) -> LongformerConfig:
    """Windows grow fourfold from the first layer to the last, and are `memories` in the mean."""
    layers = config.model.layers
    growth = 4 ** (1 / (layers - 1)) if layers > 1 else 1.0
    window = round((memories - 1) * layers / sum(growth**n for n in range(layers)))
    return LongformerConfig(window=max(1, window), growth=growth, max_window=4 * memories, global_tokens=1)


def _bigbird(config: RunConfig, memories: int) -> BigBirdConfig:
    base = BigBirdConfig()
    blocks = base.window_blocks + base.global_blocks + base.random_blocks
    return BigBirdConfig(block=max(1, memories // blocks))


def _routing(config: RunConfig, memories: int) -> RoutingConfig:
    clusters = min(RoutingConfig().clusters, memories)
    return RoutingConfig(clusters=clusters, members=memories // clusters, window=memories)


def _reformer(config: RunConfig, memories: int) -> ReformerConfig:
    base = ReformerConfig()
    buckets = min(base.buckets, 2 * max(1, memories // (2 * base.rounds)))
    return ReformerConfig(buckets=buckets, members=max(1, memories // (buckets * base.rounds)))


def _sinks(config: RunConfig, memories: int) -> StreamingSinksConfig:
    sinks = min(StreamingSinksConfig().sinks, memories // 2)
    return StreamingSinksConfig(sinks=sinks, window=memories - sinks)


RULES: dict[str, Rule] = {
    "expire_span": Rule("the budget controller holds the mean of living memories", lambda c, n: reach(c)),
    "full": Rule("none: keeps everything"),
    "transformer_xl": Rule("span", lambda c, n: TransformerXLConfig(span=n)),
    "adaptive_span": Rule("heads start at the budget, and the controller holds their mean there", _adaptive),
    "compressive": Rule("window and compressed, half each", _compressive),
    "sliding_window": Rule("window", lambda c, n: SlidingWindowConfig(window=n)),
    "longformer": Rule("window, the mean over layers", _longformer),
    "bigbird": Rule("block: tokens read, of a memory that keeps everything", _bigbird),
    "linear": Rule("none: the head dim decides"),
    "performer": Rule("features: the bytes of so many memories", lambda c, n: PerformerConfig(features=2 * n)),
    "routing": Rule("clusters x members, and the local heads' window", _routing),
    "reformer": Rule("rounds x buckets x members", _reformer),
    "tanh_rnn": Rule("none: hidden is matched to the number of parameters"),
    "gru": Rule("none: hidden is matched to the number of parameters"),
    "gru_torch": Rule("none: hidden is matched to the number of parameters"),
    "lstm": Rule("none: hidden is matched to the number of parameters"),
    "forgetting": Rule("none: keeps everything"),
    "streaming_sinks": Rule("sinks and window together", _sinks),
}
"""Every memory system by kind."""


def has_knob(kind: str) -> bool:
    return RULES[kind].mixer is not None


def with_budget(config: RunConfig, kind: str, memories: int | None) -> RunConfig:
    """The recipe's run with another memory system, held to so many memories; None is what the recipe says itself.

    Fields that press on learned spans stay with the systems that have such spans.
    """
    rule, train = RULES[kind].mixer, config.train
    count = default_memories(config) if memories is None and kind not in LEARNED else memories
    mixer = rule(config, count) if rule is not None else mixer_config(kind)
    if kind not in LEARNED:
        train = replace(train, budget=BudgetConfig(), span_weight=0.0, span_lr_scale=1.0)
    elif memories is not None:
        check_reachable(config, kind, memories)
        train = replace(train, budget=_pressure(train.budget, kind, memories))
    return replace(config, model=replace(config.model, mixer=mixer), train=train)


def _pressure(budget: BudgetConfig, kind: str, memories: int) -> BudgetConfig:
    """The recipe's controller with another target; heads that start at it are held there from the first step on."""
    budget = replace(budget, live=float(memories), bytes=None, patience_loss=None)
    return budget if kind == "expire_span" else replace(budget, start_loss=None)


def check_reachable(config: RunConfig, kind: str, memories: int) -> None:
    """Refuse budgets that no spans can meet."""
    m = reach(config)
    shortest = _shortest_mean(m, config.model.num_kv_heads) if kind == "expire_span" else 0
    least, most = m.ramp + shortest, m.max_span + m.ramp
    if memories < least:
        raise UserError(
            f"{kind} cannot hold {memories} memories: its shortest spans and the ramp of {m.ramp} keep {least:g} alive; "
            f"give a larger budget or a smaller --model.mixer.ramp"
        )
    if memories > most:
        raise UserError(
            f"{kind} cannot hold {memories} memories: max_span {m.max_span} and ramp {m.ramp} allow {most}; "
            f"give a smaller budget or a larger --model.mixer.max-span"
        )


def _shortest_mean(m: ExpireSpanConfig, heads: int) -> float:
    """The mean over heads of the shortest span of each."""
    own = heads if m.own_heads is None else min(m.own_heads, heads)
    return (own * m.min_span + (heads - own) * m.nearest_span) / heads
