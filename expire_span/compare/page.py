"""compare.html and curve.png: the table, the curve of score against memory, and how each system learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.agent_configs import AgentRunConfig
from expire_span.config import to_dict
from expire_span.runs import write_atomic
from expire_span.train.progress import show_bytes
from expire_span.view.assets import environment
from expire_span.view.efficiency import Row, show_count, show_score
from expire_span.view.pictures import Points, draw_curves, draw_trade, to_png, to_svg
from expire_span.view.report import flatten, series_of, show_values

from .budgets import describe_knob, learns_spans
from .plan import Comparison
from .table import columns_of, describe_front, how_measured


def write_page(comparison: Comparison, rows: Sequence[Row]) -> Path:
    """Write compare.html and curve.png from the comparison's folder alone."""
    page: dict[str, Any] = {"comparison": comparison, "version": __version__, "conditions": how_measured(comparison)}
    page["conditions"] = f"{page['conditions']} {describe_front(comparison, rows)}".rstrip()
    page["columns"] = [heading for heading, _, _ in columns_of(comparison)]
    page["rows"] = [[(value(row), show(row)) for _, value, show in columns_of(comparison)] for row in rows]
    page["facts"] = collect_facts(comparison, rows)
    trades = draw_trades(comparison, rows)
    page["trades"] = [(caption, to_svg(figure, f"trade{n}")) for n, (caption, figure) in enumerate(trades)]
    page["curves"] = draw_learning(comparison)
    page["knobs"] = [(kind, _how_sized(comparison, kind)) for kind in dict.fromkeys(row.kind for row in rows)]
    page["plays"] = isinstance(comparison.config, AgentRunConfig)
    page["tables"] = {name: show_values(table) for name, table in flatten(to_dict(comparison.config)).items()}
    path = comparison.path / "compare.html"
    write_atomic(comparison.path / "curve.png", to_png(draw_memory_curve(comparison, rows)))
    write_atomic(path, environment("compare").get_template("compare.html").render(page).encode())
    return path


def _how_sized(comparison: Comparison, kind: str) -> str:
    """What decided how much a system remembers. Without a budget nothing is held to a number of memories."""
    budgets = [config.train.budget.active for system, config in comparison.runs.values() if system.kind == kind]
    if learns_spans(kind) and not any(budgets):
        return "no budget was given: spans are as long as training, with the recipe's span loss, left them"
    return describe_knob(kind)


def points_of(rows: Sequence[Row], memory: Callable[[Row], float]) -> dict[str, Points]:
    """(memory, score) of each kind's rows."""
    kinds = dict.fromkeys(row.kind for row in rows)
    return {kind: [(memory(row), row.score) for row in rows if row.kind == kind] for kind in kinds}


def draw_memory_curve(comparison: Comparison, rows: Sequence[Row]) -> Any:
    """The paper's figure: score against the average number of memories."""
    name = comparison.score["name"]
    series = points_of(rows, lambda row: row.live)
    return draw_trade(series, title=f"{name} against memory", xlabel="memories alive, mean", ylabel=name)


def draw_trades(comparison: Comparison, rows: Sequence[Row]) -> list[tuple[str, Any]]:
    """Captioned curves of score against memory, in memories and in bytes."""
    name, live = comparison.score["name"], draw_memory_curve(comparison, rows)
    kilobytes = points_of(rows, lambda row: row.bytes / 1000)
    held = draw_trade(kilobytes, title=f"{name} against bytes", xlabel="kB per row", ylabel=name)
    best = "up and to the left" if comparison.score["higher_is_better"] else "down and to the left"
    return [
        (f"Mean memories alive a query, over layers and the evaluation. Better is {best}.", live),
        ("Bytes that one row's memory occupies, all layers: the fair axis for states that are not lists.", held),
    ]


def draw_learning(comparison: Comparison) -> list[tuple[str, str]]:
    """Captioned curves of the first seed of every system."""
    seen: dict[str, list[dict[str, Any]]] = {}
    for name, (system, _) in comparison.runs.items():
        run = comparison.run_of(name)
        if run is not None and system.label not in seen:
            seen[system.label] = run.read_metrics()
    score = {label: series_of(metrics, "score", "valid") for label, metrics in seen.items()}
    loss = {label: series_of(metrics, "loss", "train") for label, metrics in seen.items()}
    live: dict[str, Points] = {label: _mean_layers(metrics, "live") for label, metrics in seen.items()}
    name = comparison.score["name"]
    plays = isinstance(comparison.config, AgentRunConfig)
    scored = f"{name} in episodes for validation." if plays else f"{name} on the valid split."
    lost = "Loss of policy and value together." if plays else "Training loss, nats per scored token."
    unit = "loss" if plays else "nats"
    drawn = [
        (scored, draw_curves(score, title=name, ylabel=name)),
        (lost, draw_curves(loss, title="Loss", ylabel=unit, log=True)),
        ("Memories alive in training.", draw_curves(live, title="Memories alive", ylabel="memories", log=True)),
    ]
    return [(caption, to_svg(figure, f"learn{n}")) for n, (caption, figure) in enumerate(drawn)]


def _mean_layers(metrics: Sequence[dict[str, Any]], key: str) -> Points:
    """A training metric with one value a layer, averaged over layers."""
    lines = (line for line in metrics if line["split"] == "train")
    return [(line["step"], sum(line[key]) / len(line[key])) for line in lines]


def collect_facts(comparison: Comparison, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The few numbers at the head of the page."""
    finished = sum(row.seeds for row in rows)
    facts = [("runs finished", f"{finished} of {len(comparison.runs)}")]
    if not rows:
        return facts
    sign = 1 if comparison.score["higher_is_better"] else -1
    best = max(rows, key=lambda row: (sign * row.score, -row.live))
    small = min(rows, key=lambda row: row.bytes)
    name = comparison.score["name"]
    return facts + [
        (f"best {name}: {best.label}", show_score(best, name)),
        (f"memories alive in {best.label}", show_count(best.live)),
        (f"smallest memory: {small.label}", f"{show_bytes(small.bytes)} per row"),
        ("parameters each", f"{comparison.parameters['reference']:,}"),
    ]
