"""The efficiency table: a run's score beside what it costs, all measured: memories, bytes, device memory, time.

Comparisons show one row for each system; a run's report shows its own row among those of the comparison that it belongs to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from expire_span.disk.files import read_json
from expire_span.disk.records import MEASURED
from expire_span.disk.sizes import show_bytes
from expire_span.runs import RunFolder, UserError

TABLE = "table.json"
"""The table that a comparison writes into its folder, beside the folders of its runs."""
SHARES = ("success", "error")
"""Scores that are shown in percent, as the sources do."""


@dataclass(frozen=True)
class Row:
    label: str
    kind: str
    budget: int | None
    seeds: int
    """Number of finished runs over which the row is a mean."""
    score: float
    spread: float | None
    """Standard deviation of the score over seeds; None for a single one."""
    live: float
    """Living memories per query, the mean over layers and the evaluation."""
    peak_live: float
    """The same for the block with the largest number."""
    bytes: float
    """Bytes that one row of the batch holds over all layers, the mean over the evaluation."""
    peak_bytes: float
    device_bytes: float
    """Peak memory of training on the device (on a CPU: of the process)."""
    ms_per_step: float
    """Median training step."""
    tokens_per_second: float
    """Median over training."""
    parameters: int
    steps: float
    train_seconds: float
    """Seconds of all training steps, without evaluations and checkpoints."""


def measure(run: RunFolder, parameters: int) -> dict[str, Any]:
    """The numbers of one finished run."""
    result, speed = run.read_result(*MEASURED) or {}, run.read_speed()
    rows = result["rows"]
    paces = [line["ms_per_step"] for line in speed]
    steps = [line["step"] for line in speed]
    spent = sum(pace * (step - before) for pace, step, before in zip(paces, steps, [0, *steps])) / 1000
    return {
        "score": result["score"],
        "live": statistics.fmean(result["live"]),
        "peak_live": statistics.fmean(result["peak_live"]),
        "bytes": result["mean_bytes"] / rows,
        "peak_bytes": result["peak_bytes"] / rows,
        "device_bytes": max(line["peak_bytes"] for line in speed),
        "ms_per_step": statistics.median(_steady(paces)),
        "tokens_per_second": statistics.median(_steady([line["tokens_per_second"] for line in speed])),
        "parameters": parameters,
        "steps": run.config.train.steps,
        "train_seconds": spent,
    }


def _steady(values: Sequence[float]) -> Sequence[float]:
    """The values without the first one, which includes compilation and tuning, if there are others."""
    return values[1:] or values


def show_count(count: float) -> str:
    return f"{count:,.0f}" if count >= 100 else f"{count:.1f}"


def show_score(row: Row, name: str) -> str:
    text = format_score(row.score, name)
    if row.spread is None:
        return text
    return f"{text} ± {100 * row.spread:.1f}" if name in SHARES else f"{text} ± {row.spread:.4f}"


def format_score(score: float, name: str) -> str:
    return f"{score:.1%}" if name in SHARES else f"{score:.4f}"


Column = tuple[str, Callable[[Row], float | str], Callable[[Row], str]]


def list_columns(score: str) -> list[Column]:
    """Heading, the value that sorts, and the value as shown; `score` is the name of the task's score."""
    return [
        ("system", lambda r: r.label, lambda r: r.label),
        (score, lambda r: r.score, lambda r: show_score(r, score)),
        ("memories alive", lambda r: r.live, lambda r: show_count(r.live)),
        ("peak", lambda r: r.peak_live, lambda r: show_count(r.peak_live)),
        ("bytes per row", lambda r: r.bytes, lambda r: show_bytes(r.bytes)),
        ("peak bytes per row", lambda r: r.peak_bytes, lambda r: show_bytes(r.peak_bytes)),
        ("device memory", lambda r: r.device_bytes, lambda r: show_bytes(r.device_bytes)),
        ("ms/batch", lambda r: r.ms_per_step, lambda r: show_count(r.ms_per_step)),
        ("tokens/s", lambda r: r.tokens_per_second, lambda r: f"{r.tokens_per_second:,.0f}"),
        ("parameters", lambda r: r.parameters, lambda r: f"{r.parameters:,}"),
        ("steps", lambda r: r.steps, lambda r: f"{r.steps:,.0f}"),
        ("training", lambda r: r.train_seconds, lambda r: f"{r.train_seconds:,.0f} s"),
        ("seeds", lambda r: r.seeds, lambda r: str(r.seeds)),
    ]


# The table of one run's report


@dataclass(frozen=True)
class EfficiencyTable:
    headings: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    own: int | None = None
    """Index of the run's own row; None without one."""
    told: str = ""
    """Sentences that say under which conditions the numbers were measured, or why there are none."""


def tabulate(run: RunFolder, parameters: int | None) -> EfficiencyTable:
    """The rows of the comparison to which the run belongs; for a single run, its own row; no rows before it has finished."""
    if (run.path.parent / TABLE).is_file() and (run.path.parent / "compare.json").is_file():
        return _read_comparison(run)
    result = run.read_result() or {}
    if parameters is None or not run.read_speed() or "rows" not in result:
        return EfficiencyTable()
    mixer: Any = run.config.model.mixer
    row = Row(mixer.kind, mixer.kind, None, 1, spread=None, **measure(run, parameters))
    told = (
        "Bytes are of one row of the batch, all layers, over the final evaluation. Device memory is the training "
        "process's peak. expire-span compare puts other memory systems beside it."
    )
    return _show([row], str(result.get("score_name", "score")), 0, told)


def _read_comparison(run: RunFolder) -> EfficiencyTable:
    path = run.path.parent / TABLE
    try:
        table = read_json(path)
        names = {item.name for item in fields(Row)}
        rows = [Row(**{name: value for name, value in row.items() if name in names}) for row in table["rows"]]
        own = next((n for n, row in enumerate(rows) if run.name.startswith(f"{row.label}-seed")), None)
        return _show(rows, str(table["score"]["name"]), own, str(table.get("conditions", "")))
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        return EfficiencyTable(told=f"The comparison's table {path} cannot be read: {error}.")


def _show(rows: Sequence[Row], score: str, own: int | None, told: str) -> EfficiencyTable:
    columns = list_columns(score)
    cells = [[show(row) for _, _, show in columns] for row in rows]
    return EfficiencyTable([heading for heading, _, _ in columns], cells, own, told)
