"""`expire-span study questions`: which models are trained, and the summary of their results."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.checks import Count, checked
from expire_span.disk.files import write_picture
from expire_span.lab.study.folder import StudyFolder
from expire_span.lab.study.page import write_page
from expire_span.lab.study.pool import run_jobs

from .cells import CacheCell, EncoderCell, TaskName, run_cell
from .penalty import PENALTIES, Penalty

PENALISED: dict[Penalty, tuple[float, ...]] = {
    "none": (0.0,),
    "entropy": (0.01, 0.1),
    "columns": (0.1, 1.0),
    "unnormalised": (0.001, 0.01, 0.1),
}
"""Penalties and the weights tried on the task of notes."""
FEW: dict[Penalty, tuple[float, ...]] = {"none": (0.0,), "unnormalised": (0.01,)}
"""The same in a quick study."""


@dataclass(frozen=True)
@checked
class QuestionsSettings:
    """Which models are trained; saved as the settings of the study folder."""

    seeds: Count = 3
    encoder_steps: Count = 400
    span_steps: Count = 400
    attention_steps: Count = 250
    other_steps: Count = 300
    """Training steps of attention on the other two tasks."""
    windows: tuple[Count, ...] = (15, 96)
    encoder_budgets: tuple[Count, ...] = (16,)
    budgets: tuple[Count, ...] = (10, 16)
    everything: bool = True
    """If False, train only one weight of one penalty, and only on the task of notes."""

    @classmethod
    def quick(cls, seeds: int = 1) -> QuestionsSettings:
        """Settings that take half a minute: few cells and few steps, so that little is learned."""
        return cls(seeds, 40, 60, 50, 50, (8,), (16,), (10,), False)

    @property
    def jobs(self) -> list[EncoderCell | CacheCell]:
        return [job for seed in range(self.seeds) for job in (*self._encoders(seed), *self._caches(seed))]

    def _encoders(self, seed: int) -> list[EncoderCell]:
        spans = [EncoderCell("spans", budget, seed, self.encoder_steps) for budget in self.encoder_budgets]
        windows = [EncoderCell("window", width, seed, self.encoder_steps) for width in self.windows]
        return [EncoderCell("full", 0, seed, self.encoder_steps), *spans, *windows]

    def _caches(self, seed: int) -> list[CacheCell]:
        cells = [CacheCell("notes", "spans", "none", budget, seed, self.span_steps) for budget in self.budgets]
        weights = PENALISED if self.everything else FEW
        for penalty, strengths in weights.items():
            cells += [CacheCell("notes", "attention", penalty, w, seed, self.attention_steps) for w in strengths]
        return cells + (self._other_tasks(seed) if self.everything else [])

    def _other_tasks(self, seed: int) -> list[CacheCell]:
        """The best penalty, none, and Expire-Span where fillers have work of their own, and on recall."""
        cells: list[CacheCell] = []
        others: tuple[tuple[TaskName, int], ...] = (("chores", 12), ("recall", 8))
        for task, budget in others:
            cells.append(CacheCell(task, "spans", "none", budget, seed, self.span_steps))
            cells.append(CacheCell(task, "attention", "none", 0.0, seed, self.other_steps))
            cells.append(CacheCell(task, "attention", "unnormalised", 0.01, seed, self.other_steps))
        return cells


def is_quick(settings: QuestionsSettings) -> bool:
    """Whether the models train so few steps that the numbers say little."""
    return settings.encoder_steps <= QuestionsSettings.quick().encoder_steps


def run_study(settings: QuestionsSettings, out: Path, processes: int) -> tuple[Path, dict[str, Any]]:
    """Run the cells that are not finished, then write study.json, report.html and the pictures."""
    from .page import collect_facts, draw_all, tell_headline

    begin = time.perf_counter()
    folder = StudyFolder.open(out, "questions", asdict(settings))
    found = run_jobs(run_cell, settings.jobs, folder, processes)
    cells = [found[job.name] for job in settings.jobs]
    result: dict[str, Any] = {"study": "questions", "settings": asdict(settings), "quick": is_quick(settings)}
    result |= summarise(cells)
    result["penalty_gradients"] = penalty_gradients()
    result["cells"] = cells
    result["seconds"] = {"all_cells": sum(c["seconds"] for c in cells), "this_call": time.perf_counter() - begin}
    folder.write_result(result)
    title, lead, sections, pictures = draw_all(result)
    for name, figure in pictures.items():
        write_picture(folder.path / f"{name}.png", figure, dpi=110, bbox_inches="tight", metadata={"Software": None})
    facts = collect_facts(result)
    heads = {"title": title, "lead": lead, "headline": tell_headline(facts), "quick": result["quick"]}
    write_page(folder.path / "report.html", **heads, facts=facts, sections=sections)
    return folder.path, result


# Summary of the cells


def summarise(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """One row for every kind of model: means and spreads over seeds."""
    encoders = [c for c in cells if "memory" in c["cell"]]
    caches = [c for c in cells if "penalty" in c["cell"]]
    return {
        "encoder": [_encoder_row(group) for group in _groups(encoders, "system", "memory")],
        "cache": [_cache_row(group, caches) for group in _groups(caches, "task", "system", "penalty", "strength")],
    }


def _groups(cells: list[dict[str, Any]], *keys: str) -> Iterable[list[dict[str, Any]]]:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell["cell"][key] for key in keys), []).append(cell)
    return groups.values()


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, standard deviation over seeds (0 for one), the worst and best, and the number of seeds."""
    x = np.array(list(values), float)
    deviation = float(x.std(ddof=1)) if len(x) > 1 else 0.0
    return {"mean": float(x.mean()), "sd": deviation, "low": float(x.min()), "high": float(x.max()), "seeds": len(x)}


def _spreads(group: list[dict[str, Any]], names: dict[str, Callable[[dict[str, Any]], float]]) -> dict[str, Any]:
    return {name: spread(read(cell) for cell in group) for name, read in names.items()}


def _encoder_row(group: list[dict[str, Any]]) -> dict[str, Any]:
    head = {name: group[0]["cell"][name] for name in ("system", "memory")}
    names = ("accuracy", "live", "accuracy_before", "accuracy_after", "train_seconds")
    reads: dict[str, Callable[[dict[str, Any]], float]] = {n: (lambda cell, n=n: cell[n]) for n in names}
    for name in ("accuracy", "live", "milliseconds"):
        reads[f"long_{name}"] = lambda cell, name=name: cell["long"][name]
    spans = {kind: np.mean([c["spans"][kind] for c in group], 0).tolist() for kind in group[0]["spans"]}
    return {**head, **_spreads(group, reads), "spans": spans}


def _cache_row(group: list[dict[str, Any]], caches: list[dict[str, Any]]) -> dict[str, Any]:
    head = {name: group[0]["cell"][name] for name in ("task", "system", "penalty", "strength")}
    names = ("accuracy", "live", "change_by_deletion", "train_seconds")
    reads: dict[str, Callable[[dict[str, Any]], float]] = {n: (lambda cell, n=n: cell[n]) for n in names}
    row = {**head, **_spreads(group, reads)}
    if head["system"] == "attention":
        row["at_equal_memory"] = spread(best_within(c["curve"], spans_memory(c, caches), False) for c in group)
        row["hindsight_at_8"] = spread(_at_keep(c["curve"], 8, True) for c in group)
        row["keep_8"] = spread(_at_keep(c["curve"], 8, False) for c in group)
        row["curve"] = mean_curve(group)
        if group[0]["idle_reading"] is not None:
            row["idle_reading"] = spread(cell["idle_reading"] for cell in group)
    return row


def spans_memory(cell: dict[str, Any], caches: list[dict[str, Any]]) -> float:
    """Number of memories that the leanest Expire-Span decoder of the same task and seed holds."""
    same = [c for c in caches if all(c["cell"][key] == cell["cell"][key] for key in ("task", "seed"))]
    return min(c["live"] for c in same if c["cell"]["system"] == "spans")


def best_within(curve: list[dict[str, Any]], limit: float, hindsight: bool) -> float:
    """The best accuracy of any rule that holds at most `limit` + 0.5 memories; if there is none, that of the leanest rule."""
    points = [p for p in curve if p["rule"]["hindsight"] == hindsight]
    leanest = min(points, key=lambda p: p["live"])
    return max((p["accuracy"] for p in points if p["live"] <= limit + 0.5), default=leanest["accuracy"])


def _at_keep(curve: list[dict[str, Any]], keep: int, hindsight: bool) -> float:
    return next(p["accuracy"] for p in curve if (p["rule"]["keep"], p["rule"]["hindsight"]) == (keep, hindsight))


def mean_curve(group: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Accuracy and memories held for every rule, averaged over seeds."""
    out = []
    for points in zip(*(cell["curve"] for cell in group)):
        means = {name: float(np.mean([p[name] for p in points])) for name in ("accuracy", "live")}
        out.append({"rule": points[0]["rule"], **means})
    return out


def penalty_gradients(queries: int = 32) -> dict[str, float]:
    """Size of each penalty's gradient with respect to random scores, in float64: the L1 norm's is nothing but rounding."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(1, 1, queries, queries, generator=generator, dtype=torch.float64)
    hidden = torch.ones(queries, queries, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf).requires_grad_()
    out = {}
    for name, penalty in PENALTIES.items():
        (gradient,) = torch.autograd.grad(penalty(torch.softmax(scores, -1), scores).sum(), scores)
        out[name] = float(gradient.norm())
    return out
