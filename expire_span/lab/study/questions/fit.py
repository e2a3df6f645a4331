"""Training and measuring one small model: the package's scorer, optimizers and budget controller in a short loop.

It does not use the package's training loop, because these models are bidirectional or have penalties, need no run folder, and
train for seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expire_span.models.decoder import Decoder
from expire_span.settings.run import TrainConfig
from expire_span.tasks.contract import Batch, BatchStream
from expire_span.train.budget import BudgetController
from expire_span.train.optimizers import build_optimizers, rate_factor, set_rates
from expire_span.train.scorer import Scorer


def read(scorer: Scorer, batch: Batch) -> dict[str, Tensor]:
    """The scorer's sums for one batch of independent sequences, without carried memory."""
    return scorer(batch.x, batch.y, batch.mask, None, None, False)[0]


def fit(
    decoder: Decoder, stream: BatchStream, config: TrainConfig, tick: Callable[[float], None] = lambda _: None
) -> None:
    """Train in place. The weight of the span loss is set by the budget controller if there is a budget, else by
    `span_weight`."""
    scorer = Scorer(decoder).train()
    optimizers = build_optimizers(scorer, config)
    budget = None
    if config.budget.active:
        budget = BudgetController(config.budget, layers=decoder.config.layers, bytes_per_memory=1)
    for step in range(config.steps):
        batch = next(stream)
        sums = read(scorer, batch)
        nll = sums["nll"] / batch.mask.sum()
        weight = config.span_weight if budget is None else budget.weight
        set_rates(optimizers, rate_factor(step, config))
        (nll + weight * sums["span_loss"]).backward()
        nn.utils.clip_grad_norm_(scorer.parameters(), config.clip, error_if_nonfinite=True)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if budget is not None:
            budget.update(sums["live"].mean(), nll.detach())
        tick(1.0)


@dataclass(frozen=True)
class Measured:
    accuracy: float
    live: float
    """Number of memories that a query can read, itself included, the mean over queries and layers."""


@torch.no_grad()
def measure(decoder: Decoder, batches: Iterable[Batch], asked: Callable[[Batch], Tensor]) -> Measured:
    """Share of right answers at the positions that `asked(batch)` [B, T] marks, and memories held at all positions."""
    decoder.eval()
    right, count, live, tokens = 0, 0, 0.0, 0
    for batch in batches:
        logits, _, aux = decoder(batch.x, keep="nothing")
        where = asked(batch)
        right += int((logits.argmax(-1) == batch.y)[where].sum())
        count += int(where.sum())
        live += float(aux.live.mean()) * batch.x.numel()
        tokens += batch.x.numel()
    return Measured(right / count, live / tokens)
