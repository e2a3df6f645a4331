"""Means with confidence intervals by the block bootstrap, for values along a text, where neighbours are correlated."""

from __future__ import annotations

import numpy as np

BLOCKS = 50
"""Number of contiguous blocks that the bootstrap resamples: neighbouring values are correlated, long blocks hardly are."""
DRAWS = 1000
LOW, HIGH = 2.5, 97.5
"""Percentiles: intervals of 95%."""


def class_means(values: np.ndarray, classes: np.ndarray, count: int) -> list[dict[str, float]]:
    """For each of `count` classes: the number of values, their mean, and its interval by resampling blocks."""
    stretch = np.arange(len(values)) * BLOCKS // max(len(values), 1)
    place = stretch * count + classes
    sums = np.bincount(place, values, BLOCKS * count).reshape(BLOCKS, count)
    counts = np.bincount(place, minlength=BLOCKS * count).reshape(BLOCKS, count)
    drawn = np.random.default_rng(0).multinomial(BLOCKS, np.full(BLOCKS, 1 / BLOCKS), DRAWS)
    return [_mean(sums[:, n], counts[:, n], drawn) for n in range(count)]


def mean_of(values: np.ndarray) -> dict[str, float]:
    """The same for a few independent values, which are resampled one by one."""
    drawn = np.random.default_rng(0).multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS)
    return _mean(values.astype(float), np.ones(len(values)), drawn)


def _mean(sums: np.ndarray, counts: np.ndarray, drawn: np.ndarray) -> dict[str, float]:
    total = counts.sum()
    if not total:
        return {"count": 0, "mean": 0.0, "low": 0.0, "high": 0.0}
    above, below = drawn @ sums, drawn @ counts
    means = above[below > 0] / below[below > 0]
    low, high = np.percentile(means, [LOW, HIGH])
    return {"count": int(total), "mean": float(sums.sum() / total), "low": float(low), "high": float(high)}
