"""Pictures of an analysis."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from expire_span.view.pictures import PALETTE, STYLE, to_png

from .classes import CLASSES


def draw_all(found: dict[str, Any]) -> dict[str, bytes]:
    """Every picture by name, as PNG."""
    figures = {"classes": draw_classes(found["layers"]), "cut": draw_cuts(found["cut"])}
    if found["replaced"] is not None:
        figures["replaced"] = draw_replaced(found["replaced"])
    return {name: to_png(figure) for name, figure in figures.items()}


def tell_passages(count: int) -> str:
    return f"{count} passage" if count == 1 else f"{count} passages"


def draw_classes(layers: list[dict[str, Any]]) -> Figure:
    """Mean span of each class relative to that of all tokens, as colour, one row per layer; the numbers are the mean spans."""
    spans = np.array([[row["mean"] if row["count"] else np.nan for row in layer["classes"]] for layer in layers])
    means = np.array([max(layer["mean"], 1e-9) for layer in layers])
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 1.2 + 0.36 * len(layers)))
        axes = figure.add_subplot(title="Who lives long: mean span by class of letter", ylabel="layer")
        share = np.log2(np.maximum(spans, 1e-3) / means[:, None]).clip(-3, 3)
        image = axes.imshow(share, cmap="RdBu_r", vmin=-3, vmax=3, aspect="auto")
        axes.set_xticks(range(len(CLASSES)), CLASSES)
        axes.set_yticks(range(len(layers)), [str(layer["layer"]) for layer in layers])
        for (row, column), value in np.ndenumerate(spans):
            shown = "none" if np.isnan(value) else f"{value:.0f}"
            axes.text(column, row, shown, ha="center", va="center", fontsize=8, color="black")
        bar = figure.colorbar(image, ax=axes, ticks=[-3, 0, 3])
        bar.ax.set_yticklabels(["1/8", "mean", "8x"])
    return figure


def draw_replaced(replaced: dict[str, Any]) -> Figure:
    """Spans of the word's letters in every layer, before and after it is replaced, with intervals over passages."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.9))
        title = f"Span of “{replaced['word']}” and of what takes its place ({tell_passages(replaced['passages'])})"
        axes = figure.add_subplot(title=title, xlabel="layer", ylabel="mean span (steps)")
        for n, variant in enumerate(replaced["words"]):
            _bars(axes, variant["layers"], n, len(replaced["words"]), variant["word"])
        axes.set_xticks(*_ticks([str(layer["layer"]) for layer in replaced["words"][0]["layers"]]))
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the bars, which leave no room
    return figure


def draw_cuts(cuts: list[dict[str, Any]]) -> Figure:
    """Additional bits per letter with shorter memories, by class, one bar per limit, with intervals."""
    with rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.9))
        axes = figure.add_subplot(title="What a shorter memory costs", ylabel="bits more a letter (lower is better)")
        for n, cut in enumerate(cuts):
            _bars(axes, cut["classes"], n, len(cuts), f"spans cut to {cut['limit']:g}")
        axes.set_xticks(*_ticks(list(CLASSES)))
        axes.axhline(0, color="gray", lw=0.8)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the bars, which leave no room
    return figure


def _bars(axes: Any, rows: list[dict[str, Any]], place: int, count: int, label: str) -> None:
    """One series of bars beside `count - 1` others, each with the interval of its mean."""
    means = np.array([row["mean"] for row in rows])
    errors = np.array([[max(row["mean"] - row["low"], 0), max(row["high"] - row["mean"], 0)] for row in rows]).T
    x = np.arange(len(rows)) + (place - (count - 1) / 2) * 0.8 / count
    colour = PALETTE[place % len(PALETTE)]
    axes.bar(x, means, 0.8 / count, yerr=errors, color=colour, label=label, error_kw={"lw": 0.8})


def _ticks(labels: list[str]) -> tuple[list[int], list[str]]:
    return list(range(len(labels))), labels
