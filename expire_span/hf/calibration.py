"""Initial spans, fitted to the attention of the base model: memories that get little attention later may expire.

For every key/value head, with one price for all of them,

    minimise  mean over memories i of  lost_i(e_i) + price x min(e_i, rest_i),     e_i = L sigmoid(w . h_i + b)

lost_i(e) is the attention that queries later than age e pay to memory i (each counts by the weight of what is predicted there),
rest_i the number of tokens that come after it. The
price is chosen so that as many memories live at the end of a context as the budget allows; so heads and tokens that get
attention get the memory. The base model runs once for each context; the rest is a small optimisation problem for each layer. It
does not see how much a head's attention matters to the output: distillation learns that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from expire_span.ops.rule import is_alive

from .attention_function import observed
from .predictors import StandardisedLifetimes
from .retrofitted import Retrofit

NAME = "expire_span_calibrated"
QUERIES = 256
"""Number of queries whose attention is computed at a time."""
BIN = 16
"""Number of neighbouring queries whose attention is summed: the resolution of `lost`, in tokens."""
SHORTEST_AGE = 1
AGES_PER_OCTAVE = 3
STEPS = 200
RATE = 1.0
"""Learning rate of the fit times the width of the hidden states; the bias learns at RATE / 20."""
CORRECT_EVERY = 20
"""Number of steps after which a shift of all biases makes the fit meet the budget exactly again."""
MOST_SHIFT = 16.0
"""Largest such shift, in logits."""


@dataclass
class Observation:
    """Attention of one layer of the base model to the N memories of some contexts."""

    hidden: Tensor
    """The predictor's input for each memory, [N, C]."""
    lost: Tensor
    """Attention that is lost if a memory is deleted at each of A ages, [N, Hkv, A]."""
    rest: Tensor
    """Number of tokens that came after each memory, [N]."""


def ages_of(context: int) -> Tensor:
    """A geometric sequence of ages up to the length of the context, [A]."""
    count = math.ceil(AGES_PER_OCTAVE * math.log2(max(context / SHORTEST_AGE, 2))) + 1
    return torch.logspace(math.log10(SHORTEST_AGE), math.log10(max(context, 2 * SHORTEST_AGE)), count)


@torch.no_grad()
def observe(retrofitted: Retrofit, contexts: Iterable[tuple[Tensor, Tensor]]) -> dict[int, Observation]:
    """Run the base model over contexts of one length, each with the weights of its queries, both [1, n]; an observation for
    each layer that learns."""
    found: dict[int, list[tuple[Tensor, Tensor]]] = {x.index: [] for x in retrofitted.layers if x.window is None}
    count = 0
    queries: dict[str, Tensor] = {}

    def hand_over(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        return args, {**kwargs, "observation": (found.get(module.layer_idx), hidden, queries["weights"], retrofitted)}

    modules = [x.module for x in retrofitted.layers]
    with retrofitted.paused() as model, observed(NAME, _attend, modules, retrofitted.configs, hand_over):
        for ids, queries["weights"] in contexts:
            count = ids.shape[1]
            model(ids, use_cache=False, logits_to_keep=1)
    return {index: _join(parts, count, retrofitted.config.keep_first) for index, parts in found.items()}


def _join(parts: list[tuple[Tensor, Tensor]], count: int, first: int) -> Observation:
    """Concatenate the contexts, without their `first` tokens, which are kept in any case."""
    hidden = torch.cat([h[0, first:] for h, _ in parts])
    lost = torch.cat([x[0, :, first:].transpose(0, 1) for _, x in parts])
    rest = torch.arange(count - 1 - first, -1, -1, device=hidden.device, dtype=torch.float32)
    return Observation(hidden, lost, rest.repeat(len(parts)))


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, observation: Any, **kwargs: Any) -> Any:
    parts, hidden, weights, retrofitted = observation
    if parts is not None:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        ages = ages_of(query.shape[2]).to(query.device)
        parts.append((hidden, lost_attention(query, key, scale, ages + retrofitted.config.ramp / 2, weights)))
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def lost_attention(query: Tensor, key: Tensor, scale: float, ages: Tensor, weights: Tensor | None = None) -> Tensor:
    """Attention that memories get from queries later than each age [A]: q [B, Hq, T, D], k [B, Hkv, T, D] -> [B, Hkv, T, A].

    weights: by which each query counts, [B, T]; None counts all alike.
    """
    batch, heads, count = key.shape[:3]
    bins = -(-count // BIN)
    paid = torch.zeros(batch, heads, bins, count, device=key.device)
    for start in range(0, count, QUERIES):
        part = query[:, :, start : start + QUERIES].unflatten(1, (heads, -1)).float()  # [B, Hkv, G, c, D]
        end = start + part.shape[3]
        scores = part @ key[:, :, None, :end].float().mT * scale
        late = torch.ones(end - start, end, dtype=torch.bool, device=key.device).triu(start + 1)
        shares = scores.masked_fill_(late, -torch.inf).softmax(-1).sum(2)  # [B, Hkv, c, S]
        if weights is not None:
            shares = shares * weights[:, None, start:end, None]
        shares = F.pad(shares, (0, 0, 0, -shares.shape[2] % BIN)).unflatten(2, (-1, BIN)).sum(3)
        paid[:, :, start // BIN : start // BIN + shares.shape[2], :end] = shares
    later = F.pad(paid.flip(2).cumsum(2).flip(2), (0, 0, 0, 1)).transpose(2, 3)  # [B, Hkv, T, bins + 1]
    place = ((torch.arange(count, device=key.device).unsqueeze(1) + ages + 1) / BIN).clamp_max(bins)  # [T, A]
    low = place.floor()
    index = low.long().expand(batch, heads, -1, -1)
    at = later.gather(3, index)
    return at + (later.gather(3, (index + 1).clamp_max(bins)) - at) * (place - low)


def interpolate(lost: Tensor, ages: Tensor, span: Tensor) -> Tensor:
    """lost [N, Hkv, A] at spans [N, Hkv], interpolated linearly in the logarithm of the age."""
    step = math.log(float(ages[1] / ages[0]))
    place = (torch.log(span.clamp_min(1e-3) / ages[0]) / step).clamp(0, len(ages) - 1)
    low = place.detach().floor().clamp_max(len(ages) - 2)
    at = lost.gather(2, low.long().unsqueeze(2)).squeeze(2)
    above = lost.gather(2, low.long().unsqueeze(2) + 1).squeeze(2)
    return at + (above - at) * (place - low)


def fit(
    retrofitted: Retrofit, found: dict[int, Observation], context: int, target: float, *, steps: int | None = None
) -> float:
    """Fit the predictors so that `target` memories per head live at the end of a context; returns how many do.

    The fit starts with one span for all memories that meets the budget. Each step stays within the budget to first order (see
    `_set_gradients`), and every `CORRECT_EVERY` steps the remaining difference is corrected.
    """
    steps = steps or STEPS
    predictors: dict[int, StandardisedLifetimes] = {n: retrofitted.predictors[str(n)] for n in found}  # type: ignore[misc]
    for n, predictor in predictors.items():
        predictor.standardise(found[n].hidden)
        with torch.no_grad():
            predictor.weight.zero_()
            predictor.bias.zero_()
    live = _meet(retrofitted, found, predictors, target)
    groups = [{"params": [p.weight for p in predictors.values()], "lr": RATE / retrofitted.layers[0].dim}]
    groups.append({"params": [p.bias for p in predictors.values()], "lr": RATE / 20})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, 2 * (1 - n / steps)))
    ages = ages_of(context).to(retrofitted.model.device)
    for step in range(1, steps + 1):
        _set_gradients(found, predictors, ages)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % CORRECT_EVERY == 0 or step == steps:
            live = _meet(retrofitted, found, predictors, target)
    return live


def _set_gradients(found: dict[int, Observation], predictors: dict[int, StandardisedLifetimes], ages: Tensor) -> None:
    """Set the gradients of lost attention + price x held memory, at the price at which a common shift of all biases has a
    gradient of zero."""
    slopes = {n: _slopes(predictors[n], found[n], ages) for n in found}
    lost, held = (sum(float(pair[which][1].sum()) for pair in slopes.values()) for which in (0, 1))
    price = max(-lost / max(held, 1e-12), 0.0)
    for n, (of_lost, of_held) in slopes.items():
        predictors[n].weight.grad = of_lost[0] + price * of_held[0]
        predictors[n].bias.grad = of_lost[1] + price * of_held[1]


@torch.no_grad()
def _meet(
    retrofitted: Retrofit, found: dict[int, Observation], predictors: dict[int, StandardisedLifetimes], target: float
) -> float:
    """Add one number to the biases of all heads so that `target` memories live per head; returns how many do."""
    start = {n: p.bias.clone() for n, p in predictors.items()}
    low, high, live = -MOST_SHIFT, MOST_SHIFT, 0.0
    for _ in range(16):
        for n, predictor in predictors.items():
            predictor.bias.copy_(start[n] + (low + high) / 2)
        counts = [_living(p(found[n].hidden.unsqueeze(0))[0].T, found[n].rest, p.ramp) for n, p in predictors.items()]
        live = float(torch.stack(counts).mean()) + retrofitted.config.keep_first
        low, high = ((low + high) / 2, high) if live < target else (low, (low + high) / 2)
    return live


def _living(span: Tensor, rest: Tensor, ramp: float) -> Tensor:
    """Mean number of living memories per head at the end of a context, for spans [N, Hkv] and the rest [N] of each memory."""
    alive = is_alive(span - rest.unsqueeze(1), ramp).float().sum(0).mean()
    return alive / (rest == 0).sum()


def _slopes(predictor: StandardisedLifetimes, seen: Observation, ages: Tensor) -> list[tuple[Tensor, ...]]:
    """Gradients, to weight and bias, of the attention that a layer loses and of the memory that it holds."""
    span = predictor(seen.hidden.unsqueeze(0)).squeeze(0).T  # [N, Hkv]
    lost = interpolate(seen.lost, ages, span).mean(0).sum()
    held = torch.minimum(span, seen.rest.unsqueeze(1)).mean(0).sum()
    own = [predictor.weight, predictor.bias]
    return [torch.autograd.grad(lost, own, retain_graph=True), torch.autograd.grad(held, own)]


@torch.no_grad()
def mean_slope(retrofitted: Retrofit, found: dict[int, Observation]) -> float:
    """Derivative of the mean span (each counted up to the end of its context, in tokens) by a shift of all logits."""
    slopes = []
    for n, seen in found.items():
        predictor: Any = retrofitted.predictors[str(n)]
        low, room = predictor.min_span, predictor.max_span - predictor.min_span
        span = predictor(seen.hidden.unsqueeze(0))
        share = (span - low) / room
        slopes.append((room * share * (1 - share) * (span < seen.rest)).mean())
    return float(torch.stack(slopes).mean())
