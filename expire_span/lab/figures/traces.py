"""Figures for papers, drawn from a trace: one function each, registered in `FIGURES` by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from expire_span.disk.files import write_output
from expire_span.ops.rule import full_until, until_dead
from expire_span.runs import UserError
from expire_span.view.lines import lay_out, texts_of
from expire_span.view.pictures import PALETTE, STYLE, count_alive
from expire_span.view.trace import Trace

from .pairs import SINGLE, tell_kept, tell_scale

PRINT: dict[Any, Any] = STYLE | {name: "black" for name, value in STYLE.items() if value == STYLE["text.color"]}
PRINT |= {"pdf.fonttype": 42, "font.size": 8, "axes.titlesize": 9, "svg.fonttype": "path", "figure.dpi": 100}
"""Black text, sizes that fit a column, and fonts that a publisher accepts (TrueType, embedded)."""
COLUMNS = 100
"""Number of letters per line in the token figure."""
SHOWN = 300
"""Number of letters in the token figure."""
LEAST_STEPS, MOST_STEPS = 500, 2000
"""Smallest and largest number of steps in the timeline of a long trace: with more, single lines cannot be told apart."""


def draw_spans(trace: Trace) -> Figure:
    """Histogram of the spans that each layer gives, on logarithmic axes."""
    figure = Figure(figsize=(3.4, 2.3), layout="constrained")
    axes = figure.add_subplot(xlabel="span (steps)", ylabel="share of tokens", xscale="log", yscale="log")
    spans = np.maximum(trace.spans, 1)  # [layers, heads, T]
    edges = np.geomspace(1, max(float(trace.bounded_spans.max()), 2) * 1.01, 33)  # without memories kept for good
    for layer, values in enumerate(spans):
        share, _ = np.histogram(values, edges)
        colour = PALETTE[layer % len(PALETTE)]
        axes.stairs(share / values.size, edges, color=colour, label=f"layer {layer + 1}", lw=1.2)
    if len(spans) > 3:  # many lines leave no room for a legend among them
        figure.legend(fontsize=6, ncols=3, loc="outside upper center")
    else:
        axes.legend(fontsize=6)
    return figure


def draw_timeline(trace: Trace) -> Figure:
    """Lifelines of the layer that keeps a single memory longest, and below how many live."""
    spans = trace.spans.max(1)
    layer, ramp = int(trace.bounded_spans.max((1, 2)).argmax()), trace.header["ramp"]
    lifetime = until_dead(float(np.median(spans[layer])), ramp)
    births = np.arange(
        min(len(trace), max(LEAST_STEPS, min(int(3 * lifetime), MOST_STEPS)))
    )  # so that memories are seen to end
    deaths = trace.dies.max(1)[layer, births]
    ends = np.minimum(deaths, len(births))
    figure = Figure(figsize=(6.8, 3.2), layout="constrained")
    bars, count = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    solid = np.clip(full_until(deaths, ramp), births, ends)
    width = min(0.7, 200 / len(births))
    bars.hlines(births, births, ends, color=PALETTE[0], lw=width, alpha=0.4)
    bars.hlines(births, births, solid, color=PALETTE[0], lw=width)
    bars.set(ylabel="memory, by birth", ylim=(len(births), -1), title=f"Lifelines in layer {layer + 1}")
    count.step(births, count_alive(births, ends), where="mid", color=PALETTE[0], label="alive")
    count.plot(births, births + 1, ls=":", color="black", lw=0.8, label="never forgetting")
    count.set(xlabel="step", ylabel="memories", xlim=(0, len(births)))
    count.legend(fontsize=6)
    return figure


def draw_tokens(trace: Trace) -> Figure:
    """The first letters or words of the text, each on a background whose colour shows its mean span over layers."""
    steps = trace.steps[:SHOWN]
    means = np.maximum(trace.bounded_spans.max(1).mean(0)[: len(steps)], 0)
    spans = np.log1p(means)
    share = (spans - spans.min()) / max(float(np.ptp(spans)), 1e-6)
    texts = texts_of(steps)
    places = lay_out(texts, COLUMNS)
    rows = 1 + max((row for _, row in places), default=0)
    high = 0.2 * rows + 0.3
    figure = Figure(figsize=(6.8, high))
    axes = figure.add_axes((0.01, 0.01, 0.98, 1 - 0.25 / high))
    axes.set_axis_off()
    axes.set_title(f"mean span over layers: {tell_scale(means)}{tell_kept(trace)}", fontsize=7, loc="left", pad=2)
    axes.set(xlim=(0, COLUMNS), ylim=(rows, 0))
    for text, value, (column, row) in zip(texts, share, places):
        box = {"facecolor": (*_blue(float(value)), 1.0), "edgecolor": "none", "boxstyle": "square,pad=0.12"}
        colour = "white" if value > 0.55 else "black"
        axes.text(column, row + 0.7, text, fontsize=6, family="monospace", color=colour, bbox=box)
    return figure


def _blue(share: float) -> tuple[float, float, float]:
    """A colour from nearly white to dark blue, in which lightness alone shows the order."""
    low, high = np.array([0.93, 0.95, 0.98]), np.array([0.03, 0.16, 0.36])
    red, green, blue = low + (high - low) * share
    return float(red), float(green), float(blue)


def draw_growth(trace: Trace) -> Figure:
    """Memory held over time, all layers together, against never forgetting."""
    held = np.array([sum(step["bytes"]) for step in trace.steps]) / 1e6
    steps = np.arange(1, len(held) + 1)
    never = steps * trace.header["full_bytes"] * trace.header["layers"] / 1e6
    figure = Figure(figsize=(3.4, 2.3), layout="constrained")
    axes = figure.add_subplot(xlabel="steps read", ylabel="memory (MB, lower is better)", xscale="log", yscale="log")
    axes.plot(steps, never, color="black", ls=":", lw=1, label="never forgetting")
    axes.plot(steps, held, color=PALETTE[0], lw=1.3, label=trace.header["system"].replace("_", "-"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=6)
    return figure


def draw_ages(trace: Trace, needed: int | None = None) -> Figure:
    """Share of each layer's memories by the last age at which they can be read; `needed` is an age that they must reach.

    Only memories that die within the trace are counted. With several heads, each head's memory is one.
    """
    ages = _last_ages(trace)
    if not any(ages):
        advice = "take a run that forgets sooner, or give a run of text a longer one with --text"
        raise UserError(f"no memory was deleted within the {len(trace.steps)} steps that were read; {advice}")
    figure = Figure(figsize=(3.4, 2.3), layout="constrained")
    axes = figure.add_subplot(xlabel="last age at which a memory is read (steps)", ylabel="share of memories")
    edges = np.arange(max((max(found, default=0) for found in ages), default=0) + 2) - 0.5
    for layer, found in enumerate(ages):
        share, _ = np.histogram(found, edges)
        label = f"layer {layer + 1}, {len(found):,} deleted"
        axes.stairs(share / max(len(found), 1), edges, color=PALETTE[layer % len(PALETTE)], label=label, lw=1.2)
    if needed is not None:
        axes.axvline(float(needed), color="black", ls=":", lw=1, label=f"needed: {needed}")
    axes.legend(fontsize=6, ncols=1 + len(ages) // 7)
    return figure


def _last_ages(trace: Trace) -> list[list[int]]:
    """For each layer, the last age at which its memories could be read, for those that died within the trace."""
    out: list[list[int]] = [[] for _ in range(trace.header["layers"])]
    for step in trace.steps:
        for layer, _, birth in step.get("deaths") or ():
            out[layer].append(step["i"] - 1 - birth)
    if not trace.has_spans:
        raise ValueError(f"the memory system {trace.header['system']} gives tokens no spans, so no deaths are known")
    return out


FIGURES: dict[str, Callable[[Trace], Figure]] = {
    "spans": draw_spans,
    "timeline": draw_timeline,
    "tokens": draw_tokens,
    "growth": draw_growth,
    "ages": draw_ages,
    **SINGLE,
}
KINDS = ("pdf", "png", "svg")


def write_figure(name: str, trace: Trace, path: Path) -> None:
    """Draw a figure of one trace into a file; the file name's ending decides the format."""
    save_figure(lambda: FIGURES[name](trace), path)


def save_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Draw in the style for papers into a file; the file name's ending decides the format."""
    kind = check_kind(path)
    out = io.BytesIO()
    with rc_context(PRINT):
        metadata = {"Software": None} if kind == "png" else {"CreationDate": None} if kind == "pdf" else {"Date": None}
        draw().savefig(out, format=kind, dpi=300, facecolor="white", metadata=metadata)
    write_output(path, out.getvalue())


def check_kind(path: Path) -> str:
    """The format that a file's name asks for."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in KINDS:
        raise UserError(f"a figure is written as {', '.join(KINDS)}, got {path}; give --out NAME.pdf")
    return kind
