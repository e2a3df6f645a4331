"""The efficiency table of a comparison: one row per system and budget, the mean over its seeds, all of it measured."""

from __future__ import annotations

from dataclasses import asdict

from expire_span.runs import to_json, write_atomic
from expire_span.view.efficiency import TABLE, list_columns

from .outcome import Outcome


def as_markdown(outcome: Outcome) -> str:
    columns = list_columns(outcome.score)
    lines = ["| " + " | ".join(c[0] for c in columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    lines += ["| " + " | ".join(show(row) for _, _, show in columns) + " |" for row in outcome.rows]
    return "\n\n".join(["\n".join(lines), *filter(None, [outcome.best, outcome.conditions])]) + "\n"


def write_table(outcome: Outcome) -> None:
    """table.json and table.md."""
    score = {"name": outcome.score, "higher_is_better": outcome.higher_is_better}
    head = {"recipe": outcome.recipe, "score": score, "conditions": outcome.conditions}
    head |= {"best_for_bytes": [row.label for row in outcome.front], "environment": outcome.environment}
    write_atomic(outcome.path / TABLE, to_json({**head, "rows": [asdict(row) for row in outcome.rows]}))
    write_atomic(outcome.path / "table.md", as_markdown(outcome).encode())


def print_table(outcome: Outcome) -> None:
    """The table on the terminal; narrow ones get the columns that matter most."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    columns = list_columns(outcome.score)
    if console.width < 150:
        kept = (outcome.score, "system", "memories alive", "bytes per row", "device memory", "ms/batch")
        columns = [column for column in columns if column[0] in kept]
    table = Table(box=None, pad_edge=False, header_style="bold")
    # Where room is short, headings and names are broken, figures never.
    for n, (heading, _, show) in enumerate(columns):
        room = max((len(show(row)) for row in outcome.rows), default=0) if n else 0
        table.add_column(heading, justify="right" if n else "left", min_width=room, overflow="fold")
    for row in outcome.rows:
        table.add_row(*(show(row) for _, _, show in columns))
    console.print(table)
    if outcome.best:
        console.print(outcome.best, highlight=False)
