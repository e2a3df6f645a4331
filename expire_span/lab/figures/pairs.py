"""Figures for papers that set two or more traces side by side: another word, a shorter memory; and one text layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from expire_span.view.lines import lay_out, texts_of
from expire_span.view.trace import FOR_GOOD, Trace

COLUMNS = 96
"""Letters of a line."""
BLUE = np.array([[0.93, 0.95, 0.98], [0.03, 0.16, 0.36]])
RED = np.array([[0.97, 0.96, 0.95], [0.60, 0.09, 0.05]])
"""From nearly white to dark: lightness alone tells the order."""


def draw_layers(trace: Trace, count: int = 2 * COLUMNS) -> Figure:
    """One text layer by layer, each coloured from its own shortest to its own longest span: which tokens a layer keeps."""
    spans = trace.bounded_spans.max(1)[:, :count]  # [layers, T]
    texts = texts_of(trace.steps[:count])
    figure, panels = _panels(len(spans), _rows_of(texts))
    for layer, (axes, row) in enumerate(zip(panels, spans)):
        _write(axes, texts, _shares(row), f"layer {layer + 1}: {tell_scale(row)}{tell_kept(trace, layer)}", BLUE)
    return figure


def tell_scale(spans: np.ndarray) -> str:
    """What the lightest and the darkest colour stand for."""
    return f"{spans.min():,.0f} steps (light) to {spans.max():,.0f} steps (dark)"


def tell_kept(trace: Trace, layer: int | None = None) -> str:
    """How many tokens a layer, or any layer, keeps for good; nothing if there are none."""
    spans = trace.spans if layer is None else trace.spans[layer : layer + 1]
    kept = int((spans >= FOR_GOOD).any((0, 1)).sum())
    return f"; tokens kept for good: {kept:,}" if kept else ""


def draw_words(traces: Sequence[Trace], places: Sequence[tuple[int, int]]) -> Figure:
    """The same text with another word in it, coloured by span on one scale; `places` says where each trace has the word."""
    spans = [trace.spans.max(1).mean(0) for trace in traces]
    low, high = min(float(row.min()) for row in spans), max(float(row.max()) for row in spans)
    begin = max(min(start for start, _ in places) - COLUMNS // 2, 0)
    shown = [slice(begin, begin + 2 * COLUMNS) for _ in traces]
    texts = [texts_of(trace.steps[part]) for trace, part in zip(traces, shown)]
    figure, panels = _panels(len(traces), max(map(_rows_of, texts)))
    for axes, trace, row, words, part, (start, end) in zip(panels, traces, spans, texts, shown, places):
        word = "".join(step["text"] for step in trace.steps[start:end]).replace("␣", " ")
        title = f"{word}: kept up to {row[start:end].max():.0f} steps"
        _write(axes, words, _shares(row[part], low, high), title, BLUE)
    return figure


def draw_cut(before: Trace, after: Trace, count: int = 6 * COLUMNS) -> Figure:
    """Which tokens get worse when lives are cut: the text coloured by the bits that each costs more."""
    more = np.nan_to_num(after.bits - before.bits)
    begin = _worst_window(more, count)
    texts = texts_of(before.steps[begin : begin + count])
    figure, (axes,) = _panels(1, _rows_of(texts))
    share, mean = float((more > 0.1).mean()), float(more.mean())
    limit = after.header.get("max_span")
    what = f"a budget of {after.header['budget']:g}" if "budget" in after.header else f"spans of at most {limit:g}"
    title = f"with {what}: {mean:+.3f} bits per token; {share:.0%} of all tokens cost at least 0.1 bits more (red: 2 or more)"
    _write(axes, texts, np.clip(more[begin : begin + count] / 2, 0, 1), title, RED)
    return figure


def _worst_window(more: np.ndarray, count: int) -> int:
    """Start of the run of `count` tokens that loses most."""
    if len(more) <= count:
        return 0
    sums = np.cumsum(np.concatenate([[0], np.maximum(more, 0)]))
    return int((sums[count:] - sums[:-count]).argmax())


def _shares(row: np.ndarray, low: float | None = None, high: float | None = None) -> np.ndarray:
    """Place of each span between the shortest (0) and the longest (1), on a logarithmic scale."""
    least, most, at = (
        np.log1p(np.maximum(x, 0))
        for x in (row.min() if low is None else low, row.max() if high is None else high, row)
    )
    return (at - least) / max(float(most - least), 1e-6)


def _rows_of(texts: Sequence[str]) -> int:
    return 1 + max((row for _, row in lay_out(texts, COLUMNS)), default=0)


def _panels(count: int, rows: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(6.8, count * (0.16 * rows + 0.26) + 0.05))
    high = 1 / count
    title = 0.2 / (0.16 * rows + 0.26)  # share of a panel that its title takes
    return figure, [figure.add_axes((0.01, 1 - (n + 1) * high, 0.98, high * (1 - title))) for n in range(count)]


def _write(axes: Axes, texts: Sequence[str], shares: np.ndarray, title: str, scale: np.ndarray) -> None:
    places = lay_out(texts, COLUMNS)
    axes.set_axis_off()
    axes.set(xlim=(0, COLUMNS), ylim=(_rows_of(texts), 0))
    axes.set_title(title, fontsize=7, loc="left", pad=2)
    boxes = []
    for text, share, (column, row) in zip(texts, shares, places):
        width = len(text) + (0.3 if len(text) > 1 else 0)
        corners = (
            (column, row + 0.04),
            (column + width, row + 0.04),
            (column + width, row + 0.96),
            (column, row + 0.96),
        )
        boxes.append(corners)
        ink = "white" if share > 0.55 else "black"
        axes.text(
            column + width / 2, row + 0.55, text, fontsize=5.5, family="monospace", color=ink, ha="center", va="center"
        )
    colours = scale[0] + (scale[1] - scale[0]) * shares[: len(texts), None]
    axes.add_collection(PolyCollection(boxes, facecolors=colours.tolist(), linewidths=0), autolim=False)


SINGLE: dict[str, Callable[[Trace], Figure]] = {"layers": draw_layers}
