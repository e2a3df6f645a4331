"""compare.html and curve.png: the table, the curve of score against memory, and how each system learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.runs import write_atomic
from expire_span.settings.run import to_dict
from expire_span.view.assets import environment
from expire_span.view.efficiency import Row, list_columns
from expire_span.view.pictures import Points, draw_curves, draw_trade, to_png, to_svg
from expire_span.view.report import flatten, series_of, show_values

from .outcome import Outcome


def write_page(outcome: Outcome) -> Path:
    """Write compare.html and curve.png."""
    columns = list_columns(outcome.score)
    page: dict[str, Any] = {"outcome": outcome, "kind": outcome.config.kind, "version": __version__}
    page["columns"] = [heading for heading, _, _ in columns]
    page["rows"] = [[(value(row), show(row)) for _, value, show in columns] for row in outcome.rows]
    (_, curve), _ = trades = draw_trades(outcome)
    for name, drawn in (("trade", trades), ("learn", draw_learning(outcome))):
        page[name] = [(caption, to_svg(figure, f"{name}{n}")) for n, (caption, figure) in enumerate(drawn)]
    page["tables"] = {name: show_values(table) for name, table in flatten(to_dict(outcome.config)).items()}
    path = outcome.path / "compare.html"
    write_atomic(outcome.path / "curve.png", to_png(curve))
    write_atomic(path, environment("lab/compare").get_template("compare.html").render(page).encode())
    return path


def points_of(rows: Sequence[Row], memory: Callable[[Row], float]) -> dict[str, Points]:
    """(memory, score) of each kind's rows."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return {kind: [(memory(row), row.score) for row in rows if row.kind == kind] for kind in kinds}


def draw_trades(outcome: Outcome) -> list[tuple[str, Any]]:
    """Captioned curves of score against memory: in memories, which is the paper's figure, and in bytes."""
    name, best = outcome.score, f"{'up' if outcome.higher_is_better else 'down'} and to the left"
    live = points_of(outcome.rows, lambda row: row.live)
    held = points_of(outcome.rows, lambda row: row.bytes / 1000)
    return [
        (
            f"Mean memories alive a query, over layers and the evaluation. Better is {best}.",
            draw_trade(live, title=f"{name} against memory", xlabel="memories alive, mean", ylabel=name),
        ),
        (
            "Bytes that one row's memory occupies, all layers: the fair axis for states that are not lists.",
            draw_trade(held, title=f"{name} against bytes", xlabel="kB per row", ylabel=name),
        ),
    ]


def draw_learning(outcome: Outcome) -> list[tuple[str, Any]]:
    """Captioned curves of the first seed of every system."""
    seen, name = outcome.learning, outcome.score
    score = {label: series_of(metrics, "score", "valid") for label, metrics in seen.items()}
    loss = {label: series_of(metrics, "loss", "train") for label, metrics in seen.items()}
    live: dict[str, Points] = {label: _mean_layers(metrics, "live") for label, metrics in seen.items()}
    told, unit = outcome.config.kind.loss
    return [
        (f"{name} {outcome.config.kind.valid}.", draw_curves(score, title=name, ylabel=name)),
        (told, draw_curves(loss, title="Loss", ylabel=unit, log=True)),
        ("Memories alive in training.", draw_curves(live, title="Memories alive", ylabel="memories", log=True)),
    ]


def _mean_layers(metrics: Sequence[dict[str, Any]], key: str) -> Points:
    """A training metric with one value a layer, averaged over layers."""
    lines = (line for line in metrics if line["split"] == "train")
    return [(line["step"], sum(line[key]) / len(line[key])) for line in lines]
