"""What a suite found so far: one row per environment, one column per memory system, and a picture of how each learned."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expire_span.disk.files import to_json, write_atomic
from expire_span.runs import RunFolder
from expire_span.view.pictures import INK, PALETTE, STYLE, Points, to_png
from expire_span.view.report import series_of

from .plan import Comparison
from .published import published
from .random_play import random_score
from .suite import Suite

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5% quantiles of Student's distribution with 1, 2, ... degrees of freedom."""


@dataclass(frozen=True)
class Cell:
    """One system in one environment: the finished runs of its seeds."""

    scores: list[float]
    planned: int
    """Number of seeds that were asked for."""
    live: float
    """Mean living memories."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores)

    @property
    def half(self) -> float | None:
        """Half the width of the 95% interval of the mean over seeds; None with a single one."""
        return half_width(self.scores)


@dataclass(frozen=True)
class EnvironmentRow:
    name: str
    score: str
    """Name of the score."""
    steps: int
    """Environment steps of training."""
    random: float
    published: float | None
    cells: dict[str, Cell]
    """By system; those without a finished run are missing."""
    curves: dict[str, list[Points]]
    """(environment steps, score in validation) of every finished run, by system."""


def half_width(values: Sequence[float]) -> float | None:
    """Half the width of the 95% interval of a mean, by Student's distribution."""
    if len(values) < 2:
        return None
    free = len(values) - 1
    quantile = STUDENT[free - 1] if free <= len(STUDENT) else 1.96 + 2.6 / free
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def read_row(comparison: Comparison) -> EnvironmentRow:
    """What is finished of one environment."""
    config: Any = comparison.config
    runs = {name: run for name in comparison.runs if (run := comparison.run_of(name)) is not None and run.finished}
    results = {name: run.read_result() or {} for name, run in runs.items()}
    reported = any(result["score_name"] == "success" for result in results.values())
    score = "success" if reported else "return"
    chance = random_score(comparison.path, config)
    per_update = config.train.envs * config.train.window
    cells, curves = {}, {}
    for label in dict.fromkeys(system.label for system, _ in comparison.runs.values()):
        names = [name for name, (system, _) in comparison.runs.items() if system.label == label]
        done = [name for name in names if name in results]
        if done:
            live = statistics.fmean(statistics.fmean(results[name]["live"]) for name in done)
            cells[label] = Cell([_score(results[name], score) for name in done], len(names), live)
            curves[label] = [_curve(runs[name], per_update) for name in done]
    steps = max((result["env_steps"] for result in results.values()), default=config.train.steps * per_update)
    best = published(config.task.env) if score == "return" else None
    return EnvironmentRow(comparison.path.name, score, steps, _score(chance, score), best, cells, curves)


def _score(result: dict[str, Any], name: str) -> float:
    """A result's score under this name: where some runs report success, one that never did so has none."""
    return result["score"] if result["score_name"] == name else 0.0


def _curve(run: RunFolder, per_update: int) -> Points:
    return [(step * per_update, score) for step, score in series_of(run.read_metrics(), "score", "valid")]


@dataclass(frozen=True)
class SuiteOutcome:
    rows: list[EnvironmentRow]
    systems: list[str]
    conditions: str

    @property
    def shared(self) -> list[EnvironmentRow]:
        """The environments in which every system has a finished run."""
        return [row for row in self.rows if all(label in row.cells for label in self.systems)]

    def scaled(self, label: str) -> float:
        """Mean over the shared environments of (score - random) / (1 - random)."""
        return statistics.fmean((row.cells[label].mean - row.random) / (1 - row.random) for row in self.shared)

    def as_markdown(self) -> str:
        heads = ["environment", "steps", "random", *self.systems, "best published"]
        lines = [_line(heads), "|---|" + "---:|" * (len(heads) - 1)]
        for row in self.rows:
            shown = [_show_cell(row.cells.get(label)) for label in self.systems]
            best = "" if row.published is None else f"{row.published:.3f}"
            lines.append(_line([row.name, f"{row.steps:,}", f"{row.random:.3f}", *shown, best]))
        if len(self.shared) > 1 and all(row.random < 1 for row in self.shared):
            means = [f"{self.scaled(label):.3f}" for label in self.systems]
            lines.append(_line([f"mean of {len(self.shared)}, scaled", "", "0.000", *means, ""]))
        return "\n".join(lines) + f"\n\n{self.conditions}\n"

    def to_dict(self) -> dict[str, Any]:
        rows = [{name: x for name, x in asdict(row).items() if name != "curves"} for row in self.rows]
        return {"systems": self.systems, "conditions": self.conditions, "rows": rows}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _show_cell(cell: Cell | None) -> str:
    if cell is None:
        return "not finished"
    interval = "" if cell.half is None else f" ± {cell.half:.3f}"
    seeds = f"{len(cell.scores)} of {cell.planned} seeds" if len(cell.scores) < cell.planned else f"{cell.planned}"
    return f"{cell.mean:.3f}{interval} ({seeds}; {cell.live:.1f} alive)"


def read_suite(suite: Suite) -> SuiteOutcome:
    rows = [read_row(comparison) for comparison in suite.comparisons.values()]
    systems = dict.fromkeys(s.label for c in suite.comparisons.values() for s, _ in c.runs.values())
    conditions = (
        f"Recipe {suite.recipe}. Score of each run's best weights on fresh episodes, success or mean return: the mean over "
        "seeds and its 95% interval by Student's distribution, then in brackets the number of seeds and the mean number of "
        "living memories. Unfinished runs are left out. Scaled: (score - random) / (1 - random), in the environments in "
        "which every system has finished. Published scores are quoted from other papers, with other sizes and steps."
    )
    return SuiteOutcome(rows, list(systems), conditions)


def write_suite(suite: Suite, outcome: SuiteOutcome) -> None:
    """table.md, table.json and curves.png."""
    write_atomic(suite.path / "table.md", outcome.as_markdown().encode())
    write_atomic(suite.path / "table.json", to_json(outcome.to_dict()))
    write_atomic(suite.path / "curves.png", to_png(draw_suite(outcome)))


def draw_suite(outcome: SuiteOutcome) -> Figure:
    """A panel per environment: every seed as a thin line, the mean of a system's seeds as a thick one."""
    across = min(3, len(outcome.rows))
    down = -(-len(outcome.rows) // across)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.4 * across, 2.9 * down), layout="constrained")
        panels = figure.subplots(down, across, squeeze=False).flatten()
        for axes, row in zip(panels, outcome.rows):
            _draw_row(axes, row, outcome.systems)
        for axes in panels[len(outcome.rows) :]:
            axes.set_axis_off()
        drawn = [pair for axes in panels for pair in zip(*axes.get_legend_handles_labels())]
        named = {label: handle for handle, label in drawn}
        labels = sorted(named, key=[*outcome.systems, "random play", "best published"].index)
        figure.legend(
            [named[label] for label in labels], labels, loc="outside upper left", ncols=max(len(labels), 1), fontsize=8
        )
    return figure


def _draw_row(axes: Axes, row: EnvironmentRow, systems: Sequence[str]) -> None:
    axes.set(title=row.name, xlabel="environment steps", ylabel=row.score)
    axes.axhline(row.random, color=INK, lw=1, ls="--", label="random play")
    if row.published is not None:
        axes.axhline(row.published, color=INK, lw=1, ls=":", label="best published")
    for n, label in enumerate(systems):
        colour, curves = PALETTE[n % len(PALETTE)], row.curves.get(label, [])
        for points in curves:
            axes.plot(*zip(*points), color=colour, lw=0.6, alpha=0.5)
        mean = [(step, statistics.fmean(scores)) for step, scores in _by_step(curves).items()]
        axes.plot(*(zip(*mean) if mean else ((), ())), color=colour, lw=1.8, label=label)
    axes.grid(alpha=0.15)


def _by_step(curves: Sequence[Points]) -> dict[float, list[float]]:
    """The scores of all seeds at the steps at which every one was evaluated."""
    seen = [dict(points) for points in curves]
    shared = [step for step in seen[0] if all(step in other for other in seen)] if seen else []
    return {step: [scores[step] for scores in seen] for step in shared}
