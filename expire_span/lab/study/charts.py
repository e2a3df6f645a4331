"""Pictures of trained models: the table of the exercise, generalisation, and the word model's hidden state."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from expire_span.view.pictures import INK, PALETTE, STYLE


def draw_table(cells: list[dict[str, Any]], trained: int) -> Figure:
    """Share solved, median error and median steps to solve over layers and units."""
    layers = sorted({cell["size"]["layers"] for cell in cells})
    units = sorted({cell["size"]["units"] for cell in cells})
    maps = [np.full((len(layers), len(units)), np.nan) for _ in range(3)]
    for cell in cells:
        place = layers.index(cell["size"]["layers"]), units.index(cell["size"]["units"])
        took = [steps for steps in cell["steps_to_solve"] if steps is not None]
        error = float(np.median(cell["lengths"][str(trained)]["last"]))
        for table, value in zip(maps, (cell["solved"], error, np.median(took) if took else np.nan)):
            table[place] = value
    titles = ("share of seeds that solve it", "median error", "median steps to solve")
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 1.3 + 0.55 * len(layers)))
        for axes, table, title in zip(figure.subplots(1, 3), maps, titles):
            _draw_map(axes, table, title, layers, units)
    return figure


def _draw_map(axes: Any, table: np.ndarray, title: str, layers: list[int], units: list[int]) -> None:
    good = table if title.startswith("share") else -table
    axes.imshow(good, aspect="auto", cmap="YlGn", interpolation="nearest")
    axes.set(title=title, xlabel="units", ylabel="layers")
    axes.set_xticks(range(len(units)), [str(n) for n in units])
    axes.set_yticks(range(len(layers)), [str(n) for n in layers])
    known = good[~np.isnan(good)]
    worst, best = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    for (row, column), value in np.ndenumerate(table):
        text = "never" if np.isnan(value) else f"{value:.0f}" if title.startswith("median steps") else f"{value:.0%}"
        dark = not np.isnan(value) and best > worst and (good[row, column] - worst) / (best - worst) > 0.6
        axes.text(column, row, text, ha="center", va="center", color="white" if dark else "#222222", fontsize=9)


def draw_learning(cells: list[dict[str, Any]]) -> Figure:
    """Median error of the last count while training, one line a size."""
    layers = sorted({cell["size"]["layers"] for cell in cells})
    units = sorted({cell["size"]["units"] for cell in cells})
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.2))
        for axes, depth in zip(np.atleast_1d(figure.subplots(1, len(layers), sharey=True)), layers):
            for cell in cells:
                if cell["size"]["layers"] == depth:
                    steps, errors = zip(*cell["curve"])
                    colour = PALETTE[units.index(cell["size"]["units"])]
                    axes.plot(steps, np.median(errors, axis=1), color=colour, label=f"{cell['size']['units']} units")
            axes.set(title=f"{depth} layer{'s' if depth > 1 else ''}", xlabel="training step", ylim=(0, 1))
            axes.grid(alpha=0.15)
        axes.legend(loc="upper right", fontsize=8)
        figure.axes[0].set_ylabel("wrong last counts")
    return figure


def draw_lengths(systems: dict[str, dict[str, Any]]) -> Figure:
    """Error against the length of the series: of all last counts, and of the counts that training had shown."""
    titles = {"last": "wrong last counts", "seen_counts": "wrong among counts seen in training"}
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.4))
        for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), titles.items()):
            for colour, (name, found) in zip(PALETTE, systems.items()):
                lengths = [int(length) for length in found["lengths"]]
                errors = [float(np.median(part[key])) for part in found["lengths"].values()]
                axes.plot(lengths, errors, color=colour, marker="o", lw=2, label=name)
            axes.set(title=title, xlabel="steps of the series", ylim=(-0.03, 1.03))
            axes.set_xticks(lengths)
            axes.grid(alpha=0.15)
        figure.axes[1].legend(loc="upper left", fontsize=8)
    return figure


def draw_heat(states: np.ndarray, words: list[str], title: str) -> Figure:
    """Hidden state [units, T] over a passage: one row a unit, each scaled to its own range; words below."""
    low, high = states.min(1, keepdims=True), states.max(1, keepdims=True)
    shown = (states - low) / np.maximum(high - low, 1e-9)
    with rc_context(STYLE):
        figure = Figure(figsize=(14.0, 1.6 + 0.11 * len(states)))
        axes = figure.add_subplot(title=title, ylabel="unit, steadiest first")
        axes.imshow(shown, aspect="auto", cmap="coolwarm", interpolation="nearest")
        axes.set_xticks(range(len(words)), [escape(word) for word in words], rotation=90, fontsize=6)
    return figure


def escape(word: str) -> str:
    """Escape dollar signs, which would begin a formula in matplotlib."""
    return word.replace("$", r"\$")


def draw_stretches(groups: dict[str, list[np.ndarray]]) -> Figure:
    """How long units stay nearly constant: sorted mean stretches, one line per model."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.6))
        axes = figure.add_subplot(title="How long units hold still", xlabel="units, steadiest first")
        for colour, (name, models) in zip((PALETTE[1], INK, PALETTE[0]), groups.items()):
            for n, stretches in enumerate(models):
                order = np.sort(stretches)[::-1]
                axes.plot(order, color=colour, lw=1.6, label=name if n == 0 else None)
        axes.set(yscale="log", ylabel="mean stretch, words")
        for put in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            put(lambda value, _: f"{value:g}")
        axes.grid(alpha=0.15)
        axes.legend(loc="upper right", fontsize=8)
    return figure
