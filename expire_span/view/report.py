"""`expire-span report RUN`: one self-contained page about a run, from its folder (and its comparison's table) alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.disk.sizes import show_bytes
from expire_span.models.systems import SYSTEMS
from expire_span.runs import RunFolder, write_atomic
from expire_span.settings.run import BudgetConfig, to_dict
from expire_span.store.layouts import LEAST_SPARE

from .assets import environment, pack_trace, parts
from .efficiency import format_score, tabulate
from .findings import read_findings
from .pictures import MOST_COLUMNS, Points, draw_curves, draw_lifelines, draw_span_map, to_svg
from .sample import Sample, find_keepsakes, long_words, marks_of, sample_from
from .source import open_reader
from .trace import Trace

MAP_TOKENS = 400
"""Number of tokens of a text sample in its heat map and lifelines; an episode is shown whole."""
NEARLY = 0.9
"""Ratio of result and target above which a target counts as met."""
SCORES = {
    "bpb": "bits per byte",
    "bpc": "bits per character",
    "success": "fraction of right answers",
    "error": "fraction of wrong answers",
}
"""Axis labels of scores whose names are abbreviations."""
VIEW_TOKENS = 2048
"""Number of tokens of the trace in the page."""


def write_report(run: RunFolder) -> Path:
    """Write `report.html` into the run folder and return its path."""
    metrics = run.read_metrics()
    page: dict[str, Any] = {"run": run, "version": __version__, "facts": [], "keepsakes": [], "memory": []}
    kind = run.config.kind
    page |= {**parts(), "packed": "", "about": kind.load("about")(run.config), "kind": kind, "rules": other_rules(run)}
    page["headline"] = tell_headline(run, metrics)
    result = dict(run.read_result() or {})
    page["bands"] = tabulate_bands(result.pop("bands", None) or [])
    page["tables"] = {**flatten(result, "Result"), **flatten(to_dict(run.config)), "Environment": run.environment}
    page["tables"] = {name: show_values(table) for name, table in page["tables"].items() if table}
    weights, trace, page["note"] = look_inside(run)
    page["facts"], page["budget"] = collect_facts(run, metrics, weights), explain_budget(run)
    page["spare"] = explain_spare(result)
    page["curves"] = draw_training(metrics, name_score(run), kind.loss)
    page |= {"efficiency": tabulate(run, weights), "findings": read_findings(run)}
    if trace is not None:
        page["packed"] = pack_trace(Trace(trace.header, trace.steps[:VIEW_TOKENS]))
    if trace is not None and trace.has_spans:
        sample = sample_from(trace)
        page |= {"memory": draw_memory(run, sample), "keepsakes": find_keepsakes(sample)}
    path = Path("report.html") if run.is_shipped else run.path / "report.html"
    write_atomic(path, environment().get_template("report.html").render(page).encode())
    return path


def other_rules(run: RunFolder) -> dict[str, str]:
    """What each memory system of a model keeps, in a sentence; empty if one of them is Expire-Span, which the page explains."""
    kinds = [mixer.kind for mixer in getattr(getattr(run.config, "model", None), "mixers", ())]
    return {} if "expire_span" in kinds else {kind: SYSTEMS[kind].rule for kind in kinds}


def look_inside(run: RunFolder) -> tuple[int | None, Trace | None, str]:
    """Number of weights in the newest intact checkpoint, the trace of a sample, and a note that says why either is missing."""
    from expire_span.checkpoint import list_checkpoints

    note = run.config.kind.cannot.get("look inside")
    if note is not None:
        return None, None, note
    if not list_checkpoints(run):
        return None, None, "This run has no checkpoint yet, so there is no model to look into."
    reader = open_reader(run)
    weights = sum(p.numel() for p in reader.model.parameters())
    try:
        trace = _trace(reader)
    except ValueError as error:  # the data has moved; the rest of the report can still be written
        return weights, None, f"No sample could be read: {error}."
    return (
        weights,
        trace,
        "" if trace.has_spans else f"The memory system {trace.header['system']} gives tokens no spans.",
    )


def _trace(reader: Any) -> Trace:
    """The trace of the task's sample or of an agent's episode; a shorter one for systems without spans."""
    whole = reader.plays or reader.tracer().log.spans
    return Trace.of(reader.trace_sample(None if whole else VIEW_TOKENS))


def name_score(run: RunFolder) -> str:
    """The task's score and which way is better, for an axis."""
    from expire_span.tasks.registry import build_task

    if run.config.kind.score:
        return run.config.kind.score
    try:
        score = build_task(run.config.task).score
    except ValueError:  # the data has moved
        return "score"
    return f"{SCORES.get(score.name, score.name)}, {'higher' if score.higher_is_better else 'lower'} is better"


def series_of(metrics: Sequence[dict[str, Any]], key: str, split: str) -> Points:
    """(step, value) of one metric, where it was written."""
    return [(m["step"], m[key]) for m in metrics if m.get("split") == split and m.get(key) is not None]


def layers_of(metrics: Sequence[dict[str, Any]], key: str, split: str) -> dict[str, Points]:
    """The same for a metric with one value a layer."""
    points = series_of(metrics, key, split)
    layers = max((len(values) for _, values in points), default=0)  # type: ignore[arg-type]
    return {f"layer {n + 1}": [(step, values[n]) for step, values in points] for n in range(layers)}  # type: ignore[index]


def draw_training(metrics: Sequence[dict[str, Any]], score: str, loss: tuple[str, str]) -> list[tuple[str, str]]:
    """Captioned curves over the training steps, of all metrics that the run recorded. loss: its caption and its unit."""
    both = lambda key: {split: series_of(metrics, key, split) for split in ("train", "valid")}  # noqa: E731
    drawn = [
        (loss[0], draw_curves(both("loss"), title="Loss", ylabel=f"{loss[1]} (lower is better)", log=True)),
        ("The task's own score.", draw_curves(both("score"), title="Score", ylabel=score)),
        (
            "How many memories a query finds alive, on average, in each layer.",
            draw_curves(
                layers_of(metrics, "live", "train"),
                title="Live memories",
                ylabel="memories (lower is cheaper)",
                log=True,
            ),
        ),
        (
            "The weight of the span loss, which shortens spans.",
            draw_curves(
                {"weight": series_of(metrics, "span_weight", "train")}, title="Span weight", ylabel="weight", log=True
            ),
        ),
    ]
    shown = [(caption, figure) for caption, figure in drawn if figure.axes[0].lines] or drawn[:1]
    return [(caption, to_svg(figure, f"curve{n}")) for n, (caption, figure) in enumerate(shown)]


def draw_memory(run: RunFolder, sample: Sample) -> list[tuple[str, str, str]]:
    """Heading, caption and picture of the spans and of the lifelines."""
    marks = marks_of(sample)
    width = len(sample.labels) if marks else MAP_TOKENS
    unit = f"{sample.vocabulary[:-1]} of the sample" if sample.vocabulary != "symbols" else "step of the episode"
    layer = sample.longest_layer
    piece = run.config.kind.piece
    heat = draw_span_map(sample.spans[:, :width], title=f"Span given to each {piece}", marks=marks, unit=unit)
    title = f"Lifelines in layer {layer + 1}, which keeps longest"
    lines = draw_lifelines(
        sample.lifetimes(layer)[:width],
        kinds=sample.kinds[:width],
        marks=marks,
        names=long_words(sample, layer, width),
        title=title,
        unit=unit,
    )
    about_heat = (
        f"One column for each {piece}, one row for each layer. Bright ones have long spans, dark ones expire at once. "
        f"Where there are more than {MOST_COLUMNS}, a column is the longest span of a few neighbours."
    )
    about_lines = (
        f"Each bar is one memory: it starts where the {piece} is read and ends where the memory is deleted. "
        "Below: memories alive at each step; the dotted line is a model that never forgets."
    )
    return [
        ("Birth and expiry", about_lines, to_svg(lines, "lines")),
        ("What gets a long span", about_heat, to_svg(heat, "heat")),
    ]


def collect_facts(run: RunFolder, metrics: Sequence[dict[str, Any]], weights: int | None) -> list[tuple[str, str]]:
    """The few numbers at the head of the page: from the final result, or else from the last lines of metrics."""
    newest: dict[str, Any] = {}
    for line in metrics:
        newest |= {key: value for key, value in line.items() if value is not None}
    values = newest | (run.read_result() or {})
    facts = [("step", f"{values.get('step', 0):,} of {run.config.train.steps:,}")]
    if "score" in values:
        name = values.get("score_name", "score")
        facts.append((name, f"{values['score']:.1%}" if name == "success" else f"{values['score']:.4f}"))
    if values.get("live"):
        facts.append(("live memories per layer", f"{sum(values['live']) / len(values['live']):.1f}"))
    if "live_share" in values:
        facts.append(("of the memories seen", f"{values['live_share']:.1%}"))
    if values.get("full_bytes") and "mean_bytes" in values:
        rows = max(values.get("rows", 1), 1)
        facts.append(("held per row, spare slots included", show_bytes(values["mean_bytes"] / rows)))
        facts.append(("per row if nothing were forgotten", show_bytes(values["full_bytes"] / rows)))
    speed = run.read_speed()
    if speed:
        facts.append(("training time", f"{speed[-1]['seconds']:,.0f} s"))
    return facts + ([("weights", f"{weights:,}")] if weights is not None else [])


def tell_headline(run: RunFolder, metrics: Sequence[dict[str, Any]]) -> str:
    """One sentence with the numbers that matter: the score, and what is held instead of what. Empty before the end."""
    result = run.read_result() or {}
    if "score" not in result:
        done = max((line.get("step", 0) for line in metrics), default=0)
        return f"This run has trained {done:,} of {run.config.train.steps:,} steps and has no final score yet."
    name = str(result.get("score_name", "score"))
    scored = f"{format_score(result['score'], name)} ({SCORES.get(name, name)})"
    if not result.get("full_bytes") or "mean_bytes" not in result:
        return f"It scores {scored}{_tell_living(result)}."
    rows = max(result.get("rows", 1), 1)
    held, full = (show_bytes(result[key] / rows) for key in ("mean_bytes", "full_bytes"))
    return f"It scores {scored} and holds {held} for each {run.config.kind.sequence} instead of {full}."


def _tell_living(result: dict[str, Any]) -> str:
    """What an agent or a retrofitted model keeps, for the end of a sentence."""
    if not result.get("live"):
        return f" after {result.get('step', 0):,} training steps"
    words = f" with {sum(result['live']) / len(result['live']):,.1f} memories alive in each layer"
    if result.get("peak_live"):
        words += f", at most {max(result['peak_live']):,.0f}"
    if "live_share" in result:
        words += f", {result['live_share']:.1%} of the tokens that it has read"
    return words + (f", over {result['episodes']:,} fresh episodes" if "episodes" in result else "")


def explain_budget(run: RunFolder) -> str:
    """A sentence on whether training met its budget; empty if it had none or is not finished."""
    budget, result = getattr(run.config.train, "budget", None), run.read_result()
    if not isinstance(budget, BudgetConfig) or budget.live is None or not result or not result.get("live"):
        return ""
    live = sum(result["live"]) / len(result["live"])
    target = f"The budget was {budget.live:g} memories alive per query and layer, and the model ended with {live:.1f}."
    if live < NEARLY * budget.live:
        return (
            f"{target} The span loss shortens spans until the budget is met. Below it, its weight falls, but spans grow "
            "again only if that lowers the task's loss, which it did not."
        )
    if live > budget.live / NEARLY:
        return f"{target} The span loss had not shortened spans enough by the last step; train longer to come nearer."
    return target


def explain_spare(result: dict[str, Any]) -> str:
    """Why a run holds more bytes than one that never forgets would, if it does: on short sequences spare slots outweigh
    memories."""
    held, full = result.get("mean_bytes") or 0, result.get("full_bytes")
    if full is None or held <= full:
        return ""
    return (
        "It holds more bytes than if nothing were forgotten, because its sequences are short: a store has spare slots for at "
        f"least {LEAST_SPARE} further memories, every memory has a span and a position, and all rows of a batch are as wide as "
        "the fullest. With longer sequences this changes, because dead memories are deleted."
    )


def tabulate_bands(bands: Sequence[dict[str, Any]]) -> list[list[str]]:
    """An agent's episodes by the number of steps that an expert needs: headings, then one row for each band."""
    if not bands:
        return []
    share = lambda x: "—" if x is None else f"{x:.1%}"  # noqa: E731
    rows = [
        ["steps that an expert needs", "episodes", "solved", "95% interval", "steps", "memories alive", "most alive"]
    ]
    for band in bands:
        interval = "—" if band["low"] is None else f"{share(band['low'])} to {share(band['high'])}"
        live = "—" if band["live"] is None else f"{band['live']:.1f}"
        place = [f"{band['first']} to {band['last']}", f"{band['episodes']:,}", share(band["success"]), interval]
        rows.append([*place, f"{band['mean_steps']:.1f}", live, show_value(band["peak_live"])])
    return rows


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """A nested config as one table per part: {"Model": {"dim": ..}, "Model · mixer": {..}}."""
    tables: dict[str, dict[str, Any]] = {}
    own = {name: value for name, value in config.items() if not isinstance(value, dict)}
    if own:
        tables[prefix or "Run"] = own
    for name, value in config.items():
        if isinstance(value, dict):
            tables |= flatten(value, f"{prefix} · {name}" if prefix else name.capitalize())
    return tables


def show_values(table: dict[str, Any]) -> dict[str, str]:
    """As text; numbers of bytes as everywhere, whatever their names say before `bytes`."""
    sizes = {name for name, value in table.items() if name.endswith("bytes") and isinstance(value, (int, float))}
    return {name: show_bytes(value) if name in sizes else show_value(value) for name, value in table.items()}


def show_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(show_value(v) for v in value)
    return "—" if value is None else str(value)
