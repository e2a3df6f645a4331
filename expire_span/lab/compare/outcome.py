"""What a comparison found so far: everything that its table and its page show, read from its folder once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expire_span.runs import RunFolder
from expire_span.settings.run import RunConfig
from expire_span.train.progress import show_bytes
from expire_span.view.efficiency import Row, measure, show_count, show_score

from .budgets import describe_knob, learns_spans
from .plan import Comparison, System


@dataclass(frozen=True)
class Outcome:
    """A comparison's finished runs, and under which conditions they were measured."""

    path: Path
    recipe: str
    config: RunConfig
    score: str
    """Name of the score."""
    higher_is_better: bool
    conditions: str
    rows: list[Row]
    """One for each system and budget that has a finished run, in the order of the plan."""
    runs: int
    """Number of planned runs."""
    parameters: int
    """Parameters of the recipe's own model."""
    learning: dict[str, list[dict[str, Any]]]
    """The metrics of the first seed of every system, by label."""
    budgets: dict[str, str]
    """What decided how much each kind of system remembers."""
    environment: dict[str, Any]
    """The environment of the first run."""

    @property
    def sign(self) -> int:
        return 1 if self.higher_is_better else -1

    @property
    def front(self) -> list[Row]:
        """The Pareto front: systems for which no other scores as well with as few bytes and is better in one of the two."""

        def beats(other: Row, row: Row) -> bool:
            better, smaller = self.sign * (other.score - row.score), row.bytes - other.bytes
            return better >= 0 and smaller >= 0 and (better > 0 or smaller > 0)

        return [row for row in self.rows if not any(beats(other, row) for other in self.rows)]

    @property
    def best(self) -> str:
        """The front in a sentence; empty where there is nothing to compare."""
        if len(self.rows) < 2:
            return ""
        labels = ", ".join(row.label for row in self.front)
        return f"Best for the bytes they hold (no other system scores as well with as few): {labels}."

    @property
    def headline(self) -> str:
        """The best system and the best with learned expiry, each with its score and bytes, in one sentence."""
        if not self.rows:
            return ""
        best = max(self.rows, key=self._by_score_and_bytes)
        ours = max((r for r in self.rows if r.kind == "expire_span"), key=self._by_score_and_bytes, default=None)
        other = min(self.rows, key=lambda row: row.bytes) if ours in (None, best) else ours
        tell = lambda row: f"{show_score(row, self.score)} with {show_bytes(row.bytes)} per row"  # noqa: E731
        rest = "" if other is best else f"; {other.label} reaches {tell(other)}"
        return f"Best {self.score}: {best.label} reaches {tell(best)}{rest}."

    def _by_score_and_bytes(self, row: Row) -> tuple[float, float]:
        return self.sign * row.score, -row.bytes

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The few numbers at the head of the page."""
        facts = [("runs finished", f"{sum(row.seeds for row in self.rows)} of {self.runs}")]
        if not self.rows:
            return facts
        best = max(self.rows, key=lambda row: (self.sign * row.score, -row.live))
        small = min(self.rows, key=lambda row: row.bytes)
        return facts + [
            (f"best {self.score}: {best.label}", show_score(best, self.score)),
            (f"memories alive in {best.label}", show_count(best.live)),
            (f"smallest memory: {small.label}", f"{show_bytes(small.bytes)} per row"),
            ("parameters each", f"{self.parameters:,}"),
        ]


def read_outcome(comparison: Comparison) -> Outcome:
    """Read what is finished of a comparison."""
    runs = {name: run for name in comparison.runs if (run := comparison.run_of(name)) is not None}
    score = _find_score(comparison.score["name"], runs.values())
    learning: dict[str, list[dict[str, Any]]] = {}
    for name, run in runs.items():
        label = comparison.runs[name][0].label
        if label not in learning:
            learning[label] = run.read_metrics()
    return Outcome(
        *(comparison.path, comparison.recipe, comparison.config, score, comparison.score["higher_is_better"]),
        conditions=_describe_conditions(comparison, score),
        rows=_collect_rows(comparison, runs, score),
        runs=len(comparison.runs),
        parameters=comparison.parameters["reference"],
        learning=learning,
        budgets=_describe_budgets(comparison),
        environment=next((run.environment for run in runs.values()), {}),
    )


def _find_score(planned: str, runs: Any) -> str:
    """The name of the score that was given: whether an environment reports success is known only once it has been played."""
    return "success" if any(score_name(run) == "success" for run in runs if run.finished) else planned


def score_name(run: RunFolder) -> str | None:
    """The name of a finished run's score."""
    return (run.read_result() or {}).get("score_name")


def _collect_rows(comparison: Comparison, runs: dict[str, RunFolder], score: str) -> list[Row]:
    groups: dict[str, list[tuple[System, dict[str, Any]]]] = {}
    for name, run in runs.items():
        if run.finished:
            system, numbers = comparison.runs[name][0], measure(run, comparison.parameters[name])
            if score == "success" and score_name(run) == "return":
                numbers["score"] = 0.0  # not one of its episodes reported success
            groups.setdefault(system.label, []).append((system, numbers))
    return [_mean_row(label, measured) for label, measured in groups.items()]


def _mean_row(label: str, runs: Sequence[tuple[System, dict[str, Any]]]) -> Row:
    system, first = runs[0]
    means: dict[str, Any] = {name: statistics.fmean(numbers[name] for _, numbers in runs) for name in first}
    scores = [numbers["score"] for _, numbers in runs]
    means["parameters"] = first["parameters"]
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    return Row(label, system.kind, system.budget, len(runs), spread=spread, **means)


def _describe_conditions(comparison: Comparison, score: str) -> str:
    """Under which conditions the numbers hold."""
    config, seconds = comparison.config, comparison.train_seconds
    kind = config.kind.load("comparison")
    trained = kind.describe_length(config)
    if seconds is not None:
        trained = f"{seconds:g} s of training each, the number of steps set from the speed at the start"
    better = "higher" if comparison.score["higher_is_better"] else "lower"
    measured = kind.describe_score(config, score, better)
    return f"Recipe {comparison.recipe}, {trained}; {measured} Device memory is the training process's peak."


def _describe_budgets(comparison: Comparison) -> dict[str, str]:
    """Without a budget nothing is held to a number of memories."""
    active: dict[str, bool] = {}
    for system, config in comparison.runs.values():
        active[system.kind] = active.get(system.kind, False) or config.train.budget.active
    free = "no budget was given: spans are as long as training, with the recipe's span loss, left them"
    return {kind: free if learns_spans(kind) and not held else describe_knob(kind) for kind, held in active.items()}
