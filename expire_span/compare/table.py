"""The efficiency table of a comparison: one row per system and budget, the mean over its seeds, all of it measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from expire_span.agent_configs import AgentRunConfig
from expire_span.runs import RunFolder, to_json, write_atomic
from expire_span.view.efficiency import TABLE, Column, Row, list_columns, measure

from .plan import Comparison, System


def with_found_score(comparison: Comparison) -> Comparison:
    """The comparison with the name of the score that its agents were given: whether an environment reports success is known
    only once it has been played."""
    runs = [run for run in map(comparison.run_of, comparison.runs) if run is not None and run.finished]
    found = isinstance(comparison.config, AgentRunConfig) and any(score_name(run) == "success" for run in runs)
    return replace(comparison, score={**comparison.score, "name": "success"}) if found else comparison


def score_name(run: RunFolder) -> str | None:
    """The name of a finished run's score."""
    return (run.read_result() or {}).get("score_name")


def collect_rows(comparison: Comparison) -> list[Row]:
    """One row for each system and budget that has a finished run, in the order of the plan."""
    groups: dict[str, list[tuple[System, dict[str, Any]]]] = {}
    for name, (system, _) in comparison.runs.items():
        run = comparison.run_of(name)
        if run is not None and run.finished:
            numbers = measure(run, comparison.parameters[name])
            if comparison.score["name"] == "success" and score_name(run) == "return":
                numbers["score"] = 0.0  # not one of its episodes reported success
            groups.setdefault(system.label, []).append((system, numbers))
    return [_mean_row(label, runs) for label, runs in groups.items()]


def _mean_row(label: str, runs: list[tuple[System, dict[str, Any]]]) -> Row:
    system, first = runs[0]
    means: dict[str, Any] = {name: statistics.fmean(numbers[name] for _, numbers in runs) for name in first}
    scores = [numbers["score"] for _, numbers in runs]
    means["parameters"] = first["parameters"]
    spread = statistics.stdev(scores) if len(scores) > 1 else None
    return Row(label, system.kind, system.budget, len(runs), spread=spread, **means)


def columns_of(comparison: Comparison) -> list[Column]:
    """Heading, the value that sorts, and the value as shown."""
    return list_columns(comparison.score["name"])


def find_front(comparison: Comparison, rows: Sequence[Row]) -> list[Row]:
    """The Pareto front: systems for which no other scores as well with as few bytes and is better in one of the two."""
    sign = 1 if comparison.score["higher_is_better"] else -1

    def beats(other: Row, row: Row) -> bool:
        better, smaller = sign * (other.score - row.score), row.bytes - other.bytes
        return better >= 0 and smaller >= 0 and (better > 0 or smaller > 0)

    return [row for row in rows if not any(beats(other, row) for other in rows)]


def describe_front(comparison: Comparison, rows: Sequence[Row]) -> str:
    """The same in a sentence; empty where there is nothing to compare."""
    if len(rows) < 2:
        return ""
    labels = ", ".join(row.label for row in find_front(comparison, rows))
    return f"Best for the bytes they hold (no other system scores as well with as few): {labels}."


def how_measured(comparison: Comparison) -> str:
    """One sentence that says under which conditions the numbers hold."""
    train = comparison.config.train
    if isinstance(comparison.config, AgentRunConfig):
        return _how_played(comparison, comparison.config)
    rows, block = train.eval_batch or train.batch, train.eval_block or train.block
    part = "the whole test split" if train.test_batches is None else f"the first {train.test_batches} batches of test"
    if comparison.train_seconds is None:
        trained = f"{train.steps:,} steps each"
    else:
        trained = (
            f"{comparison.train_seconds:g} s of training each, the number of steps set from the speed at the start"
        )
    better = "higher" if comparison.score["higher_is_better"] else "lower"
    return (
        f"Recipe {comparison.recipe}, {trained}; {comparison.score['name']} ({better} is better) over {part} in "
        f"{rows} rows of {block}-token blocks, memory carried. Bytes are of one row over all layers. "
        "Device memory is the training process's peak."
    )


def _how_played(comparison: Comparison, config: AgentRunConfig) -> str:
    trained = f"{config.train.steps:,} updates of {config.train.envs} x {config.train.window} steps each"
    if comparison.train_seconds is not None:
        trained = (
            f"{comparison.train_seconds:g} s of training each, the number of steps set from the speed at the start"
        )
    name = comparison.score["name"]
    return (
        f"Recipe {comparison.recipe} in {config.task.env}, {trained}; {name} (higher is better) of the best weights "
        f"over at least {config.train.test_episodes:,} fresh episodes. Bytes are of one environment's memory over all "
        "layers. Device memory is the training process's peak."
    )


def as_markdown(comparison: Comparison, rows: Sequence[Row]) -> str:
    columns = columns_of(comparison)
    lines = ["| " + " | ".join(c[0] for c in columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(show(row) for _, _, show in columns) + " |" for row in rows]
    told = [describe_front(comparison, rows), how_measured(comparison)]
    return "\n\n".join(["\n".join(lines), *filter(None, told)]) + "\n"


def write_table(comparison: Comparison, rows: Sequence[Row]) -> None:
    """table.json and table.md."""
    head = {"recipe": comparison.recipe, "score": comparison.score, "conditions": how_measured(comparison)}
    environments = [run.environment for run in (comparison.run_of(name) for name in comparison.runs) if run is not None]
    head["best_for_bytes"] = [row.label for row in find_front(comparison, rows)]
    head["environment"] = environments[0] if environments else {}
    write_atomic(comparison.path / TABLE, to_json({**head, "rows": [asdict(row) for row in rows]}))
    write_atomic(comparison.path / "table.md", as_markdown(comparison, rows).encode())


def print_table(comparison: Comparison, rows: Sequence[Row]) -> None:
    """The table on the terminal; narrow ones get the columns that matter most."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = columns_of(comparison)
    if console.width < 150:
        kept = (comparison.score["name"], "system", "memories alive", "bytes per row", "device memory", "ms/batch")
        columns = [column for column in columns if column[0] in kept]
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Where room is short, headings and names are broken, figures never.
    for n, (heading, _, show) in enumerate(columns):
        room = max((len(show(row)) for row in rows), default=0) if n else 0
        table.add_column(heading, justify="right" if n else "left", min_width=room, overflow="fold")
    for row in rows:
        table.add_row(*(show(row) for _, _, show in columns))
    console.print(table)
    if len(rows) > 1:
        console.print(describe_front(comparison, rows), highlight=False)
