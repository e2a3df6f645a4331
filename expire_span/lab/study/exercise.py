"""The exercise: gated networks learn entrance counting from random weights. How do depth and width matter?

All seeds of one `Size` (layers x units) are trained at once, on new series at every step, to predict the count so far after
each value. A prediction is right if it rounds to the count. A network has solved the task if the last count is right on the
share `SOLVED` of the test series.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from expire_span.settings.run import EntrancesTask
from expire_span.tasks.entrances import Series, count_entrances

from .networks import Networks

SOLVED = 0.95
"""Share of the test series on which the last count must be right."""
TASK = EntrancesTask()
TRAINED = TASK.max_length
"""Length in steps of the series on which networks are trained."""
LENGTHS = (TRAINED, 2 * TRAINED, 4 * TRAINED)
"""Lengths of the test series."""
TEST_SERIES = 512
CHECK_SERIES = 200
CHECK_EVERY = 25


@dataclass(frozen=True)
class Size:
    """One cell of the exercise: networks of one size, all seeds together."""

    layers: int
    units: int
    seeds: int = 5
    steps: int = 800
    batch: int = 32
    lr: float = 0.06

    @property
    def name(self) -> str:
        return f"layers-{self.layers}-units-{self.units}"

    @property
    def cost(self) -> float:
        """Work relative to other sizes, measured: a layer's step costs about as much as 25 units more."""
        return self.layers * self.steps * (25 + self.units) * (10 + self.seeds) / 1e6


Predict = Callable[[np.ndarray], np.ndarray]
"""Values [B, T] -> predicted counts [..., B, T]."""


def measure(predict: Predict, lengths: tuple[int, ...] = LENGTHS, series: int = TEST_SERIES) -> dict[str, Any]:
    """Errors on new series of each length: of the last count, of all counts, and of those counts that also occur in training.

    Each is a list with one number per network for which `predict` gives counts (one where it gives [B, T]).
    """
    source, seen, table = Series(TASK, "test", 0), 0, {}
    for length in lengths:
        values = source.whole(np.arange(series), length)
        truth = count_entrances(values)
        seen = seen or int(truth.max())
        wrong = predict(values) != truth  # [..., B, T]
        wrong = wrong.reshape(-1, *truth.shape)
        table[str(length)] = {
            "last": wrong[..., -1].mean(-1).tolist(),
            "all": wrong.mean((-1, -2)).tolist(),
            "seen_counts": wrong[:, truth <= seen].mean(-1).tolist(),
            "mean_count": float(truth[:, -1].mean()),
        }
    return {"lengths": table, "largest_seen": seen}


def train_size(size: Size, tick: Callable[[float], None] = lambda cost: None) -> dict[str, Any]:
    """Train all seeds of one size; returns errors and learning curves. tick: called with the cost of the work just done."""
    begin, busy = time.perf_counter(), time.process_time()
    seeds = list(range(size.seeds))
    networks = Networks(size.layers, size.units, seeds)
    optimizer = torch.optim.Adam(networks.parameters(), lr=size.lr, fused=False, foreach=False)
    sources = [Series(TASK, "train", seed) for seed in seeds]
    curve: list[tuple[int, list[float]]] = []
    for step in range(size.steps):
        numbers = np.arange(step * size.batch, (step + 1) * size.batch)
        values = np.stack([source.whole(numbers, TRAINED) for source in sources])  # [N, B, T]
        update(networks, optimizer, values, rate_at(step, size))
        if (step + 1) % CHECK_EVERY == 0 or step + 1 == size.steps:
            curve.append((step + 1, last_errors(networks)))
            tick(size.cost * (step + 1 - (curve[-2][0] if len(curve) > 1 else 0)) / size.steps)
    found = measure(lambda values: predict(networks, values))
    last = np.array(found["lengths"][str(TRAINED)]["last"])
    return {
        "size": asdict(size),
        "weights": networks.weights,
        "solved": float((last <= 1 - SOLVED).mean()),
        "steps_to_solve": [first_below(curve, n, 1 - SOLVED) for n in seeds],
        "curve": curve,
        "seconds": time.perf_counter() - begin,
        "processor_seconds": time.process_time() - busy,
        **found,
    }


def rate_at(step: int, size: Size) -> float:
    """The learning rate: a short warm-up, then cosine decay."""
    return size.lr * min(1.0, (step + 1) / 20) * (0.5 + 0.5 * math.cos(math.pi * step / size.steps))


def update(networks: Networks, optimizer: torch.optim.Optimizer, values: np.ndarray, rate: float) -> None:
    """One step of Adam on the squared error of the running count; the seeds' networks are independent."""
    x, truth = (torch.from_numpy(part).float() for part in (values, count_entrances(values)))
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    (networks(x) - truth).square().mean((1, 2)).sum().backward()
    networks.clip()
    optimizer.step()


@torch.no_grad()
def predict(networks: Networks, values: np.ndarray) -> np.ndarray:
    """The same series [B, T] for every network: rounded counts [N, B, T]."""
    x = torch.from_numpy(values).float().expand(len(networks.out), *values.shape)
    return networks(x).round().long().numpy()


def last_errors(networks: Networks) -> list[float]:
    """Share of the check series whose last count is wrong, for each network."""
    values = Series(TASK, "valid", 0).whole(np.arange(CHECK_SERIES), TRAINED)
    wrong = predict(networks, values)[..., -1] != count_entrances(values)[:, -1]
    return wrong.mean(-1).tolist()


def first_below(curve: list[tuple[int, list[float]]], network: int, limit: float) -> int | None:
    """The step of the first check at which a network's error was at most `limit`; None if there is none."""
    return next((step for step, errors in curve if errors[network] <= limit + 1e-9), None)
