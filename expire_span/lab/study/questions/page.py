"""The page of the study: both questions and their answers, in words, pictures and tables."""

from __future__ import annotations

from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expire_span.lab.study.page import Section
from expire_span.view.pictures import INK, PALETTE, STYLE

TITLE = "Two questions about expiring memories"
LEAD = (
    "Readers of the Expire-Span paper ask two things. It was made for models that read from left to right: would it "
    "work in an encoder, which looks both ways? And is it needed at all: could one not put a penalty on ordinary "
    "attention weights, and drop what gets no attention? Both are answered here by training small models, several "
    "times each from different random starts."
)
NAMES = {
    "none": "no penalty",
    "l1": "L1 of the weights",
    "entropy": "entropy",
    "columns": "attention per memory",
    "unnormalised": "unnormalised weights",
    "spans": "Expire-Span",
    "full": "full attention",
    "window": "fixed window",
}
COLOURS = {"spans": 0, "unnormalised": 1, "none": 2, "columns": 3, "entropy": 4, "l1": 5, "full": 2, "window": 1}
TASKS = {"notes": "notes", "chores": "notes and chores", "recall": "recall"}


def percent(value: dict[str, float]) -> str:
    """Mean and standard deviation over seeds; a single seed has no deviation."""
    return f"{100 * value['mean']:.1f}" + (f" ± {100 * value['sd']:.1f}%" if value.get("seeds", 2) > 1 else "%")


def number(value: dict[str, float], digits: int = 1) -> str:
    return f"{value['mean']:.{digits}f}" + (f" ± {value['sd']:.{digits}f}" if value.get("seeds", 2) > 1 else "")


def colour(kind: str) -> str:
    return PALETTE[COLOURS[kind]]


def collect_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The few numbers at the head of the page, and of what the command prints."""
    spans = leanest(result["encoder"])
    full = next(row for row in result["encoder"] if row["system"] == "full")
    ours = leanest([row for row in result["cache"] if row["task"] == "notes"])
    facts = [
        ("encoder with spans: labels that are right", percent(spans["accuracy"])),
        (f"tokens that its queries read, of {full['live']['mean']:.0f}", number(spans["live"])),
        ("encoder with full attention: labels that are right", percent(full["accuracy"])),
        ("size of the gradient of the L1 norm of attention weights", f"{result['penalty_gradients']['l1']:.0e}"),
        (f"decoder with spans, {ours['live']['mean']:.0f} memories: right", percent(ours["accuracy"])),
    ]
    for row in rivals(result, "notes"):
        facts.append(
            (f"attention with {NAMES[row['penalty']]}, as many memories: right", percent(row["at_equal_memory"]))
        )
    return facts


def tell_headline(facts: list[tuple[str, str]]) -> str:
    """The first numbers as one sentence."""
    (_, right), (of, read), (_, full) = facts[:3]
    whole = of.rsplit("read", 1)[-1].lstrip(", ")
    return (
        f"An encoder with spans labels {right} of the tokens correctly while its queries read {read} {whole} tokens; full "
        f"attention labels {full}."
    )


def leanest(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The Expire-Span row that holds the fewest memories."""
    return min((row for row in rows if row["system"] == "spans"), key=lambda row: row["live"]["mean"])


def rivals(result: dict[str, Any], task: str) -> list[dict[str, Any]]:
    """For every penalty, the row of its best weight at the same memory as the leanest Expire-Span row."""
    best: dict[str, dict[str, Any]] = {}
    for row in result["cache"]:
        if row["task"] == task and row["system"] == "attention":
            other = best.get(row["penalty"])
            if other is None or row["at_equal_memory"]["mean"] > other["at_equal_memory"]["mean"]:
                best[row["penalty"]] = row
    return list(best.values())


def draw_all(result: dict[str, Any]) -> tuple[str, str, list[Section], dict[str, Figure]]:
    """Title, lead, sections, and the pictures by name."""
    pictures = {"questions_encoder": draw_encoder(result["encoder"]), "questions_cache": draw_cache(result)}
    spans = draw_spans(leanest(result["encoder"]))
    sections = [
        encoder_section(result, pictures["questions_encoder"], spans),
        trap_section(result),
        cache_section(result, pictures["questions_cache"]),
    ]
    return TITLE, LEAD, sections, pictures


# Sections


def encoder_section(result: dict[str, Any], curve: Figure, spans: Figure) -> Section:
    text = (
        "Each question, a token somewhere in a long sequence, must be labelled with the colour that a note gives to "
        "its name; the note lies at least 48 steps away, before or after the question. The rest is filler, and rumours "
        "that look like notes but mean nothing. A token's age is its distance: it can be read from both sides as far "
        "as its span reaches. 'Long' is the same model on sequences eight times as long, with one thread. "
    ) + encoder_finding(result["encoder"])
    head = ["encoder", "right", "right, note after", "right, note before", "tokens read"]
    table = [head + ["long: right", "long: tokens read", "long: ms", "training s"]]
    for row in result["encoder"]:
        name = NAMES[row["system"]] + (f" {row['memory']}" if row["memory"] else "")
        rates = [percent(row[key]) for key in ("accuracy", "accuracy_before", "accuracy_after")]
        long = [percent(row["long_accuracy"]), number(row["long_live"]), number(row["long_milliseconds"], 0)]
        table.append([name, *rates, number(row["live"]), *long, number(row["train_seconds"], 0)])
    about = (
        "Right labels against the tokens that a query can read, averaged over queries and layers. Dots are means, bars reach "
        "from the worst to the best random start."
    )
    kinds = "How far each kind of token can be read, on average, in each layer of the leanest encoder with spans."
    return Section("Can it work in an encoder?", text, [(about, curve), (kinds, spans)], table)


def encoder_finding(rows: list[dict[str, Any]]) -> str:
    """The numbers in a sentence: spans, full attention, and the widest window."""
    windows = [row for row in rows if row["system"] == "window"]
    widest = max(windows, key=lambda row: row["live"]["mean"])
    full = next(row for row in rows if row["system"] == "full")
    shown = (("Expire-Span", leanest(rows)), ("full attention", full), ("the widest window", widest))
    parts = [f"{name} {percent(row['accuracy'])} with {row['live']['mean']:.0f} tokens read" for name, row in shown]
    return f"Right labels: {', '.join(parts)}."


def trap_section(result: dict[str, Any]) -> Section:
    text = (
        "Attention weights are positive, and those of one query sum to one. So their L1 norm is one whatever the model "
        "does: the penalty is a constant, and its gradient is zero up to rounding. Penalties that do something must "
        "look at something else: at how spread a query's attention is (entropy), at how many memories are read by "
        "anybody (the square root of all attention that each gets), or at the weights before they are made to sum to "
        "one."
    )
    table = [["penalty", "size of its gradient"]]
    table += [[NAMES[name], f"{size:.1e}"] for name, size in result["penalty_gradients"].items()]
    return Section("The trap in penalising attention", text, [], table)


def cache_section(result: dict[str, Any], curves: Figure) -> Section:
    text = (
        "A decoder reads notes and must answer questions about them later. With ordinary attention, a penalty is added "
        "in training, and then a cache keeps only the memories that got most attention so far, or drops those whose "
        "mean attention is below a threshold: the past is all it may use. 'Equal memory' takes the best of all rules "
        "that hold no more than Expire-Span with the same random start. Hindsight judges by attention still to come, "
        "which no stream can know. 'Idle' says how many times as much attention a note gets from fillers, which ask "
        "nothing, as any other memory does. The last column is what deleting changes: with Expire-Span the largest change "
        "of any log-probability, with attention the mean change of an answer's probability when eight memories are kept. "
        "Weights and rules of attention are chosen by the very answers that are scored, in its favour."
    )
    head = ["task", "decoder", "weight or budget", "right, nothing dropped", "memories", "right at equal memory"]
    table = [head + ["8 kept", "8 kept in hindsight", "idle", "change by deleting"]]
    for row in result["cache"]:
        kind = "spans" if row["system"] == "spans" else row["penalty"]
        line = [TASKS[row["task"]], NAMES[kind], f"{row['strength']:g}", percent(row["accuracy"]), number(row["live"])]
        if row["system"] == "spans":
            line += ["", "", "", ""]
        else:
            line += [percent(row[key]) for key in ("at_equal_memory", "keep_8", "hindsight_at_8")]
            line += [number(row["idle_reading"]) if "idle_reading" in row else ""]
        table.append([*line, f"{row['change_by_deletion']['mean']:.1e}"])
    about = (
        "Right answers against memories held. Lines: ordinary attention with the best weight of each penalty, as the cache "
        "keeps more. Blue: Expire-Span, with bars from the worst to the best random start."
    )
    return Section("Would penalising attention do the same?", text, [(about, curves)], table)


# Pictures


def draw_encoder(rows: list[dict[str, Any]]) -> Figure:
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 3.6))
        axes = figure.add_subplot(xlabel="tokens that a query can read", ylabel="right labels")
        for system in ("window", "spans", "full"):
            own = sorted((r for r in rows if r["system"] == system), key=lambda r: r["live"]["mean"])
            _draw_points(axes, [r["live"] for r in own], [r["accuracy"] for r in own], system)
        axes.axhline(0.25, color=INK, lw=0.8, ls=":")
        axes.annotate("guessing", (1, 0.25), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=9)
        _finish(axes, "center left")
    return figure


def _draw_points(axes: Axes, across: list[dict[str, float]], up: list[dict[str, float]], kind: str) -> None:
    """Means joined by a line, with bars from the worst to the best random start."""
    x, y = [v["mean"] for v in across], [v["mean"] for v in up]
    bars = [[v["mean"] - v["low"] for v in up], [v["high"] - v["mean"] for v in up]]
    axes.errorbar(x, y, yerr=bars, color=colour(kind), marker="o", ms=5, lw=1.4, capsize=3, label=NAMES[kind])


def _finish(axes: Axes, legend: Literal["lower right", "center left"] = "lower right") -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylim(0.15, 1.04)
    axes.grid(alpha=0.15)
    axes.legend(loc=legend, fontsize=9)


def draw_spans(row: dict[str, Any]) -> Figure:
    """Bars: mean span of each kind of token, layer by layer."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.5, 2.6))
        axes = figure.add_subplot(ylabel="span (steps)")
        layers = len(next(iter(row["spans"].values())))
        for layer in range(layers):
            places = [n + (layer - (layers - 1) / 2) * 0.35 for n in range(len(row["spans"]))]
            heights = [values[layer] for values in row["spans"].values()]
            axes.bar(places, heights, width=0.32, color=PALETTE[layer], label=f"layer {layer + 1}")
        axes.set_xticks(range(len(row["spans"])), list(row["spans"]))
        axes.grid(alpha=0.15, axis="y")
        axes.legend(loc="upper right", fontsize=9)
    return figure


def draw_cache(result: dict[str, Any]) -> Figure:
    tasks = [name for name in TASKS if any(row["task"] == name for row in result["cache"])]
    with rc_context(STYLE):
        figure = Figure(figsize=(1.5 + 3.9 * len(tasks), 3.7))
        for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks):
            for row in rivals(result, task):
                kept = [p for p in row["curve"] if p["rule"]["keep"] is not None and not p["rule"]["hindsight"]]
                x, y = zip(*((p["live"], p["accuracy"]) for p in kept))
                axes.plot(x, y, color=colour(row["penalty"]), marker=".", lw=1.4, label=NAMES[row["penalty"]])
            ours = [row for row in result["cache"] if row["task"] == task and row["system"] == "spans"]
            ours.sort(key=lambda row: row["live"]["mean"])
            _draw_points(axes, [r["live"] for r in ours], [r["accuracy"] for r in ours], "spans")
            axes.set(title=TASKS[task], xlabel="memories held", ylabel="right answers")
            _finish(axes)
        figure.tight_layout()
    return figure
