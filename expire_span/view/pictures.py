"""The report's pictures. Each function draws one matplotlib figure; `to_svg` makes it part of a page.

Text and axes are drawn in `INK`, which becomes the page's own text colour, so that one picture suits light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

INK = "#123456"
"""Placeholder colour, replaced by `currentColor`."""
PAPER = "#fefefd"
"""Placeholder colour, replaced by the colour of the card on which the page shows a picture."""
HALO = withStroke(linewidth=3, foreground=PAPER)
"""Keeps a word readable where it crosses a bar."""
PALETTE = ("#3b82f6", "#f97316", "#10b981", "#a855f7", "#ef4444", "#8b5e34", "#eab308", "#ec4899")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
}
Points = Sequence[tuple[float, float]]
MOST_BARS = 1500
"""Largest number of lifelines in a picture; longer samples are cut."""


MOST_COLUMNS = 240
"""Largest number of columns of a heat map: each is then wide enough to be seen."""


def to_svg(figure: Figure, salt: str) -> str:
    """The figure as an inline SVG element that refers to nothing outside the page; `salt` makes its ids unique."""
    out = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(out, format="svg", transparent=True, bbox_inches="tight", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 width="100%" role="img"', svg, count=1)
    return svg.replace(INK, "currentColor").replace(PAPER, "var(--card, #ffffff)")


def draw_curves(series: dict[str, Points], *, title: str, ylabel: str, log: bool = False) -> Figure:
    """Lines over training steps; a series of one point is drawn as a dot."""
    with rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.9))
        axes = figure.add_subplot(title=title, xlabel="training step", ylabel=ylabel)
        for colour, (name, points) in zip(PALETTE * (1 + len(series) // len(PALETTE)), series.items()):
            kept = [(x, y) for x, y in points if not log or y > 0]
            if kept:
                marker = "o" if len(kept) < 30 else ""
                axes.plot(*zip(*kept), color=colour, label=name, lw=1.6, marker=marker, ms=3)
        _log_scale(axes, log and bool(axes.lines))
        axes.grid(alpha=0.15)
        if len(axes.lines) > 5:  # many lines leave no room for a legend among them
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)
        elif len(axes.lines) > 1:
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(axes.lines), fontsize=8)
            axes.set_title(title, loc="left", pad=22)
    return figure


def draw_trade(series: dict[str, Points], *, title: str, xlabel: str, ylabel: str) -> Figure:
    """Score against memory on a logarithmic axis: one line a system, its points in order of memory."""
    with rc_context(STYLE):
        figure = Figure(figsize=(7.4, 4.2))
        axes = figure.add_subplot(title=title, xlabel=xlabel, ylabel=ylabel)
        for n, (name, points) in enumerate(series.items()):
            colour, marker = PALETTE[n % len(PALETTE)], "osD^vPX*"[n // len(PALETTE) % 8]
            axes.plot(*zip(*sorted(points)), color=colour, label=name, lw=1.8, marker=marker, ms=6)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.15, which="both")
        if series:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def to_png(figure: Figure) -> bytes:
    """The figure as a picture on white."""
    out = io.BytesIO()
    with rc_context(STYLE):
        figure.savefig(out, format="png", dpi=130, facecolor="white", bbox_inches="tight", metadata={"Software": None})
    return out.getvalue()


def _log_scale(axes: Axes, wanted: bool) -> None:
    """Plain numbers on the axes; between powers of ten only where the range holds few of them."""
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if not wanted:
        return
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if high / low < 20:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5) if high / low > 3 else range(1, 10)))
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    else:
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_span_map(spans: np.ndarray, *, title: str, marks: dict[int, str], unit: str) -> Figure:
    """Heat map of spans [layers, T]: one column a token, one row a layer, colour on a logarithmic scale."""
    layers, length = spans.shape
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 1.5 + 0.35 * layers))
        axes = figure.add_subplot(title=title, xlabel=unit, ylabel="layer")
        norm = LogNorm(vmin=1, vmax=max(2.0, float(spans.max())))
        each = -(-length // MOST_COLUMNS) or 1
        edges = (-0.5, -(-length // each) * each - 0.5, -0.5, layers - 0.5)
        options: dict[str, Any] = {"aspect": "auto", "origin": "lower", "cmap": "viridis", "interpolation": "nearest"}
        picture = axes.imshow(np.maximum(pool_columns(spans), 1), norm=norm, extent=edges, **options)
        axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
        axes.set_yticks(range(layers), [str(n + 1) for n in range(layers)])
        _mark_top(axes, marks, layers - 0.5)
        bar = figure.colorbar(picture, ax=axes, pad=0.01)
        bar.set_label("span (steps)")
    return figure


def pool_columns(spans: np.ndarray, most: int = MOST_COLUMNS) -> np.ndarray:
    """At most `most` columns [layers, <= most]: each the longest of its neighbours, so that a single one that lasts is seen."""
    each = -(-spans.shape[1] // most)
    if each <= 1:
        return spans
    missing = -spans.shape[1] % each
    padded = np.pad(spans, ((0, 0), (0, missing)), mode="edge")
    return padded.reshape(len(spans), -1, each).max(2)


def _mark_top(axes: Axes, marks: dict[int, str], top: float) -> None:
    """Name single tokens above the picture."""
    for place, name in marks.items():
        axes.annotate(
            name,
            (place, top),
            xytext=(0, 13),
            textcoords="offset points",
            ha="right" if place > axes.get_xlim()[1] / 2 else "left",
            arrowprops={"arrowstyle": "-", "color": INK, "lw": 1},
        )
    if marks:
        axes.set_title(axes.get_title(loc="left"), loc="left", pad=30)


def draw_lifelines(
    lifetimes: np.ndarray,
    *,
    kinds: Sequence[str],
    marks: dict[int, str],
    title: str,
    unit: str,
    names: dict[int, str] | None = None,
) -> Figure:
    """Each memory a horizontal bar from birth to deletion, oldest at the top; below it, how many are alive.

    lifetimes [T]: steps for which each memory can be read. kinds [T]: what each memory is, one colour a kind.
    marks are written where memories begin, names where they end.
    """
    lifetimes, kinds = lifetimes[:MOST_BARS], list(kinds)[:MOST_BARS]
    length = len(lifetimes)
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 5.6))
        bars, count = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        births = np.arange(length)
        ends = np.minimum(births + np.maximum(lifetimes, 1), length)
        for colour, kind in zip(PALETTE * length, dict.fromkeys(kinds)):
            rows = np.array([k == kind for k in kinds])
            _draw_bars(bars, births[rows], ends[rows], colour, kind, width=1.2 if rows.sum() > 3 else 3.0)
        bars.set(title=title, ylabel="memory (by birth)", xlim=(0, length), ylim=(length + 1, -1 - length / 12))
        _mark_bars(bars, marks, ends)
        for place, name in (names or {}).items():
            at = (float(ends[place]), place)
            bars.annotate(name, at, xytext=(3, 0), textcoords="offset points", va="center", fontsize=8.5)
        if len(set(kinds)) > 1:
            bars.legend(
                loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, fontsize=8
            )  # outside: bars may lie anywhere
        _draw_alive(count, births, ends, unit)
    return figure


def _draw_bars(axes: Axes, births: np.ndarray, ends: np.ndarray, colour: str, kind: str, width: float) -> None:
    lines = [[(b, b), (e, b)] for b, e in zip(births, ends)]
    axes.add_collection(LineCollection(lines, colors=colour, linewidths=width, label=kind))


def _mark_bars(axes: Axes, marks: dict[int, str], ends: np.ndarray) -> None:
    for place, name in marks.items():
        if place < len(ends):
            late = place > len(ends) / 2
            offset, side = ((-8, 0), "right") if late else ((4, 5), "left")
            how: dict[str, Any] = {"textcoords": "offset points", "ha": side, "weight": "bold", "zorder": 4}
            axes.annotate(name, (place, place), xytext=offset, path_effects=[HALO], **how)


def _draw_alive(axes: Axes, births: np.ndarray, ends: np.ndarray, unit: str) -> None:
    """How many memories are alive at each step, beside what a model that never forgets would hold."""
    length = len(births)
    alive = count_alive(births, ends)
    axes.fill_between(births, alive, step="mid", color=PALETTE[0], alpha=0.35, lw=0)
    axes.step(births, alive, where="mid", color=PALETTE[0], lw=1.2, label="alive")
    axes.plot(births, births + 1, color=INK, lw=0.8, ls=":", label="never forgetting")
    axes.set(xlabel=unit, ylabel="memories alive", ylim=(0, max(4.0, min(length, 3 * float(alive.max())))))
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.legend(loc="upper left", ncols=2)  # the curves start at zero, so there is room
    axes.grid(alpha=0.15)


def count_alive(births: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Memories alive at each step: born at or before it, and ending after it."""
    change = np.zeros(len(births) + 1, np.int64)
    np.add.at(change, births, 1)
    np.add.at(change, np.minimum(ends, len(births)), -1)
    return np.cumsum(change)[:-1]
