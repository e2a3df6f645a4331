"""The table of a suite: mean scores, differences to the full cache with their intervals, and bytes, by method and budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .record import PERPLEXITY
from .scoring import paired_interval
from .tasks import RULER

Line = dict[str, Any]
Scores = dict[str, dict[int, float]]
"""Scores by task and index of the prompt."""


@dataclass(frozen=True)
class Row:
    """One method at one budget."""

    method: str
    budget: float
    scores: dict[str, float]
    """Mean score of each task; for perplexity, the perplexity."""
    average: float | None
    """Mean over the tasks of RULER, or over all others but perplexity if there is none of RULER."""
    difference: tuple[float, float, float] | None
    """Average minus that of the full cache on the same prompts, and its 95% interval; None without a full cache."""
    loss_difference: tuple[float, float, float] | None
    """The same for the loss of documents, in nats a token."""
    kept_bytes: float
    """Mean over prompts."""
    peak_bytes: float
    """Largest over prompts."""
    held_bytes: float
    """Mean over prompts."""
    live: float | None
    """Mean of the living memories while answering, as a share of the tokens seen."""
    prompts: int

    @property
    def name(self) -> str:
        return "full cache" if self.method == "none" else f"{self.method} {self.budget:g}"


def summarise(lines: Sequence[Line]) -> list[Row]:
    """A row for each method and budget, in the order in which they appear; the full cache first.

    Perplexities are of the documents that all of them have read.
    """
    read: dict[tuple[str, float], set[int]] = {}
    for line in lines:
        if line["task"] == PERPLEXITY:
            read.setdefault((line["method"], line["budget"]), set()).add(line["index"])
    shared = set.intersection(*read.values()) if read else set()
    lines = [x for x in lines if x["task"] != PERPLEXITY or x["index"] in shared]
    groups: dict[tuple[str, float], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["method"], line["budget"]), []).append(line)
    full = scores_of(groups.get(("none", 1.0), []))
    order = sorted(groups, key=lambda x: x[0] != "none")
    return [_row(*key, groups[key], full) for key in order]


def scores_of(lines: Sequence[Line]) -> Scores:
    found: Scores = {}
    for line in lines:
        found.setdefault(line["task"], {})[line["index"]] = line["score"]
    return found


def averaged(tasks: Sequence[str]) -> list[str]:
    """The tasks over which an average is taken."""
    ruler = [x for x in tasks if x in RULER]
    return ruler or [x for x in tasks if x != PERPLEXITY]


def _row(method: str, budget: float, lines: Sequence[Line], full: Scores) -> Row:
    scores = scores_of(lines)
    means = {task: _mean(list(x.values())) for task, x in scores.items()}
    chosen = averaged(list(scores))
    average = _mean([means[task] for task in chosen]) if chosen else None
    if PERPLEXITY in means:
        means[PERPLEXITY] = math.exp(min(means[PERPLEXITY], 700.0))
    live = [x["live"] for x in lines if x.get("live") is not None]
    return Row(
        method,
        budget,
        means,
        average,
        _compare(scores, full, chosen),
        _compare(scores, full, [PERPLEXITY] if PERPLEXITY in scores else []),
        _mean([x["kept_bytes"] for x in lines]),
        max(x["peak_bytes"] for x in lines),
        _mean([x["held_bytes"] for x in lines]),
        _mean(live) if live else None,
        len(lines),
    )


def _compare(scores: Scores, full: Scores, tasks: Sequence[str]) -> tuple[float, float, float] | None:
    """The difference on the prompts that both have answered."""
    ours, theirs = {}, {}
    for task in tasks:
        both = sorted(scores[task].keys() & full.get(task, {}).keys())
        if both:
            ours[task], theirs[task] = [scores[task][n] for n in both], [full[task][n] for n in both]
    return paired_interval(ours, theirs) if ours else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def show_interval(found: tuple[float, float, float] | None, scale: float = 100, digits: int = 1) -> str:
    if found is None:
        return ""
    mean, low, high = (scale * x for x in found)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def show_score(task: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if task == PERPLEXITY else f"{100 * value:.1f}"


def tabulate(rows: Sequence[Row]) -> list[list[str]]:
    """Headings and cells as text."""
    tasks = list(dict.fromkeys(task for row in rows for task in row.scores))
    heading = ["method", "average", "difference to full", "kept MiB", "peak MiB", "held MiB", "living", *tasks]
    table = [heading]
    for row in rows:
        sizes = [f"{x / 2**20:.2f}" for x in (row.kept_bytes, row.peak_bytes, row.held_bytes)]
        cells = [row.name, show_score("", row.average), "" if row.method == "none" else show_interval(row.difference)]
        live = "" if row.live is None else f"{100 * row.live:.1f}%"
        table.append([*cells, *sizes, live, *(show_score(task, row.scores.get(task)) for task in tasks)])
    return table
