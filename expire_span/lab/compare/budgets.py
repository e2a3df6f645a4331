"""Turns a recipe into a run of another memory system with a given number of memories. Standard library only.

Each system declares which setting (its knob) decides the number of memories (`MemorySystem.budget`); systems without one give
one point of a sweep.

A hybrid is written 3xgated_deltanet+expire_span: three layers of the first system, one of the second, and so on in turn. Its
budget is that of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expire_span.models.systems import Recipe, find, split_hybrid
from expire_span.runs import UserError
from expire_span.settings.run import BudgetConfig, ExpireSpanConfig, RunConfig

DEFAULT_SHARE = 16
"""Without a budget in the recipe, systems with a fixed number of memories get the longest span divided by this."""


def kinds_of(name: str) -> list[str]:
    """The kinds that a name of --mixers consists of: one, or a hybrid's two."""
    return [kind for _, kind in split_hybrid(name)]


def allowed_spans(config: RunConfig) -> ExpireSpanConfig:
    """The recipe's settings of learned spans, or the defaults where it uses another memory system."""
    mixer = config.model.mixer
    return mixer if isinstance(mixer, ExpireSpanConfig) else ExpireSpanConfig()


def default_memories(config: RunConfig) -> int:
    """Number of memories for a system with a fixed number: the recipe's budget, or a share of its longest span."""
    live = config.train.budget.live
    return max(1, round(live)) if live is not None else max(1, allowed_spans(config).max_span // DEFAULT_SHARE)


def has_knob(name: str) -> bool:
    """Whether a system can be held to a number of memories."""
    return find(kinds_of(name)[-1]).budget.settings is not None


def describe_knob(name: str) -> str:
    """The setting that decides the number of memories, in words."""
    return find(kinds_of(name)[-1]).budget.knob


def learns_spans(name: str) -> bool:
    """Whether training decides how long a system remembers."""
    return any(find(kind).learns_spans for kind in kinds_of(name))


def with_budget(config: RunConfig, name: str, memories: int | None) -> RunConfig:
    """The recipe's run with another memory system and `memories` memories; None takes what the recipe says.

    Settings of the span loss are kept only for systems that learn spans.
    """
    kinds, train = kinds_of(name), config.train
    mixers = [_settings(config, kind, memories if kind == kinds[-1] else None) for kind in kinds]
    if not learns_spans(name):
        train = replace(train, budget=BudgetConfig(), span_weight=0.0, span_lr_scale=1.0)
    elif memories is not None and find(kinds[-1]).learns_spans:
        check_reachable(config, kinds[-1], memories)
        train = replace(train, budget=_with_target(train.budget, kinds[-1], memories))
    partner = mixers[0] if len(mixers) > 1 else None
    if partner:
        _check_room(name, config.model.layers)
    pattern = "".join(count * mark for (count, _), mark in zip(split_hybrid(name), "pm")) if partner else ""
    model = replace(config.model, mixer=mixers[-1], partner=partner, pattern=pattern)
    return replace(config, model=model, train=train)


def _check_room(name: str, layers: int) -> None:
    """Refuse a hybrid in a model with too few layers for its second system."""
    (count, first), (_, second) = split_hybrid(name)
    if count >= layers:
        raise UserError(
            f"the hybrid {name} begins with {count} layers of {first} and the model has {layers}, so that {second} would get "
            f"none; give --model.layers of at least {count + 1}"
        )


def _settings(config: RunConfig, kind: str, memories: int | None) -> Any:
    """A system's settings for `memories` memories."""
    system, spans = find(kind), allowed_spans(config)
    count = default_memories(config) if memories is None and not system.learns_spans else memories
    recipe = Recipe(config.model.layers, spans.max_span, spans.ramp, spans.initial_span, spans)
    rule = system.budget.settings
    return rule(recipe, count) if rule is not None else system.settings()


def _with_target(budget: BudgetConfig, kind: str, memories: int) -> BudgetConfig:
    """The recipe's budget settings with another target. Systems other than expire_span start with spans at the target, so for
    them the span loss does not wait for the task loss to fall."""
    budget = replace(budget, live=float(memories), bytes=None, patience_loss=None)
    return budget if kind == "expire_span" else replace(budget, start_loss=None)


def check_reachable(config: RunConfig, kind: str, memories: int) -> None:
    """Refuse budgets that no spans can meet."""
    m = allowed_spans(config)
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
    own = heads if m.reach.own_heads is None else min(m.reach.own_heads, heads)
    return (own * m.min_span + (heads - own) * m.shortest_shared) / heads
