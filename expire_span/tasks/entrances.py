"""Entrance counting: a series of numbers, and after each of them the question how often the series has entered [0, 1].

An entrance is the first step of a maximal run of steps inside [0, 1]. A perfect memory needs only the count so far and whether
the last step was inside. Values are means of hashed draws, so that any step of any series can be drawn alone. A decoder reads
each value as one of a few levels; `Series.values` gives the numbers themselves.

Tokens: levels from low to high, the beginning, padding, then the answers 0, 1, 2, ...
"""

from __future__ import annotations

import math

import numpy as np
import torch

from expire_span.settings.tasks import EntrancesTask

from .contract import Batch, Score, Split, Symbols
from .episodes import EVAL_EPISODES, PackedEpisodes, WholeEpisodes, below, key_of
from .hashing import draws_of

OUTER_UNITS = 2
"""Distance beyond either edge of [0, 1] that has levels of its own; all values further out share the outermost level."""


def is_inside(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= 1)


def count_entrances(values: np.ndarray) -> np.ndarray:
    """[..., T] -> how many entrances there were up to each step."""
    inside = is_inside(values)
    before = np.zeros_like(inside)
    before[..., 1:] = inside[..., :-1]
    return np.cumsum(inside & ~before, axis=-1)


class Entrances:
    """Every step of a series is scored: its target is the count so far."""

    score = Score("success", higher_is_better=True)

    def __init__(self, config: EntrancesTask) -> None:
        self.config = config
        self.begin = config.levels * (1 + 2 * OUTER_UNITS)
        self.pad = self.begin + 1
        self.first_answer = self.pad + 1
        self.codec = Symbols(self.first_answer + config.max_count + 1, self.label)
        self.longest = config.max_length + 1

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> WholeEpisodes | PackedEpisodes:
        """One series per row where a block can hold the longest; otherwise series after series, memory carried."""
        kind = WholeEpisodes if block >= self.longest else PackedEpisodes
        return kind(Series(self.config, split, seed), batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def to_levels(self, values: np.ndarray) -> np.ndarray:
        """The token of each value."""
        return np.clip(np.floor((values + OUTER_UNITS) * self.config.levels), 0, self.begin - 1).astype(np.int64)

    def label(self, token: int) -> str:
        if token >= self.first_answer:
            return f"count {token - self.first_answer}"
        if token >= self.begin:
            return ("begin", "pad")[token - self.begin]
        value = (token + 0.5) / self.config.levels - OUTER_UNITS
        return f"{'inside' if 0 <= value <= 1 else 'outside'} {value:.3g}"


class Series:
    """Series by number. The valid and test splits hold `EVAL_EPISODES`; training never ends."""

    def __init__(self, config: EntrancesTask, split: Split, seed: int) -> None:
        self.config, self.task = config, Entrances(config)
        self.pad, self.shortest = self.task.pad, config.min_length + 1
        self.count = None if split == "train" else EVAL_EPISODES
        self.key = key_of(split, seed)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Steps of each series, uniform between the configured ends."""
        low, high = self.config.min_length, self.config.max_length
        return low + below(self._draws(numbers, 0), high - low + 1)

    def widths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each: the beginning, then the series."""
        return self.lengths(numbers) + 1

    def values(self, numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The series at each step (from 0); numbers and steps have one shape."""
        config = self.config
        draws = [self._draws(numbers, 1 + steps + k) >> np.uint64(11) for k in range(config.smooth)]
        total = np.sum(draws, axis=0, dtype=np.float64) / 2.0**53
        spread = config.spread * math.sqrt(12 / config.smooth)
        return leave_margin(np.asarray(0.5 + spread * (total - config.smooth / 2)), config.margin)

    def whole(self, numbers: np.ndarray, length: int) -> np.ndarray:
        """[B] -> the first `length` values of each series, [B, length]."""
        return self.values(*np.broadcast_arrays(numbers[:, None], np.arange(length)))

    def counts(self, numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Entrances up to each step, [B, T]; before the first step none."""
        unique, where = np.unique(numbers, return_inverse=True)
        counted = count_entrances(self.whole(unique, self.config.max_length))  # [series, steps]
        counted = np.concatenate([np.zeros((len(unique), 1), counted.dtype), counted], 1)
        return counted[where.reshape(numbers.shape), np.clip(steps + 1, 0, self.config.max_length)]

    def batch(self, numbers: np.ndarray, steps: np.ndarray, fresh: np.ndarray) -> Batch:
        """Tokens, targets and the scored positions at [B, T] places; step 0 is the beginning."""
        task, at = self.task, steps - 1
        over = at >= self.lengths(numbers)
        x = np.where(over, task.pad, np.where(at < 0, task.begin, task.to_levels(self.values(numbers, at))))
        mask = (at >= 0) & ~over
        answers = task.first_answer + np.minimum(self.counts(numbers, at), self.config.max_count)
        y = np.where(mask, answers, 0)
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _draws(self, numbers: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        return draws_of(self.key, numbers, steps)


def leave_margin(values: np.ndarray, margin: float) -> np.ndarray:
    """Push values away from 0 and 1 without changing which of them lie inside."""
    inside = margin + (1 - 2 * margin) * values
    return np.where(values < 0, values - margin, np.where(values > 1, values + margin, inside))
