"""Pictures of the hand-made memories: counter, tanh units, leaky counter, sensitivity, gates."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from expire_span.view.pictures import INK, PALETTE, STYLE

from .leaky import REST, run_leaky, weights_of
from .tanh_stack import detect, family, first_layer

BLUE, ORANGE, GREEN, VIOLET, RED = PALETTE[:5]


def draw_series(axes: Axes, values: np.ndarray) -> None:
    """A series with the band [0, 1] behind it."""
    axes.axhspan(0, 1, color=BLUE, alpha=0.15, lw=0)
    axes.plot(values, color=INK, lw=1, marker="o", ms=2.5)
    axes.set(ylabel="series", xlim=(-0.5, len(values) - 0.5))


def draw_counter(values: np.ndarray, rows: np.ndarray) -> Figure:
    """The series, the two rows of state as strips, and the count. rows [2, T]."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 4.4))
        series, strips, count = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1.6))
        draw_series(series, values)
        series.set(title="A series, the counter's two units, and the count")
        shown = np.stack([rows[0], rows[1] / max(1, rows[1].max())])
        strips.imshow(shown, aspect="auto", cmap="Blues", interpolation="nearest", vmin=-0.1, vmax=1.1)
        strips.set_yticks([0, 1], ["inside", "count"])
        count.step(np.arange(len(values)), rows[1], where="post", color=ORANGE, lw=1.8)
        count.set(xlabel="step", ylabel="entrances")
    return figure


def draw_family(grid: np.ndarray) -> Figure:
    """Members of tanh(w (x cos a + h sin a) + b) over the plane of input and state."""
    angles, scales = (0, 45, 90, 135), (1.0, 3.0, 10.0)
    with rc_context(STYLE):
        figure = Figure(figsize=(9.5, 7.2))
        table = figure.subplots(len(scales), len(angles), sharex=True, sharey=True)
        for row, scale in zip(table, scales):
            for axes, angle in zip(row, angles):
                shape = family(math.radians(angle), scale, 0.0, grid)
                span = (grid[0], grid[-1], grid[0], grid[-1])
                picture = axes.imshow(shape, origin="lower", extent=span, cmap="coolwarm", vmin=-1, vmax=1)
                axes.set_title(f"{angle}°, slope {scale:g}", fontsize=9)
        for axes in table[-1]:
            axes.set_xlabel("input x")
        for axes in table[:, 0]:
            axes.set_ylabel("state h'")
        figure.colorbar(picture, ax=table, shrink=0.7, label="tanh of the mixture")
    return figure


def draw_stack(x: np.ndarray) -> Figure:
    """Both layers over x, with the right sign of the bias and with the other."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.4))
        sides = figure.subplots(1, 2, sharey=True)
        for axes, sign, title in zip(sides, (1, -1), ("bias +a: answers to [0, 1]", "bias -a: answers to [-1, 0]")):
            left, right = first_layer(x, sign=sign)
            axes.axvspan(0, 1, color=BLUE, alpha=0.12, lw=0)
            axes.plot(x, left, color=GREEN, lw=1.2, ls="--", label="tanh(a x)")
            axes.plot(x, right, color=VIOLET, lw=1.2, ls="--", label=f"tanh(-a x {'+' if sign > 0 else '-'} a)")
            axes.plot(x, detect(x, sign=sign), color=ORANGE, lw=2.2, label="tanh(sum)")
            axes.set(title=title, xlabel="x")
            axes.legend(loc="lower right", fontsize=8)
    return figure


def draw_leak(ratios: np.ndarray, table: np.ndarray, values: np.ndarray) -> Figure:
    """Left: increment and retention over the ratio of the weights. Right: three such counters on one series."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.8))
        trade, traces = figure.subplots(1, 2)
        trade.plot(ratios, table[:, 0], color=ORANGE, lw=2, label="increment of one step inside")
        trade.plot(ratios, table[:, 1], color=BLUE, lw=2, label=f"share left after {REST} quiet steps")
        trade.set(xscale="log", xlabel="w1 / w2", title="Noticing against keeping", ylim=(0, 1))
        trade.legend(loc="upper center", fontsize=8)
        for ratio, colour in zip((0.5, 4.0, 32.0), (ORANGE, GREEN, BLUE)):
            trace = run_leaky(detect(values), *weights_of(ratio))
            traces.plot(trace, color=colour, lw=1.6, label=f"w1 / w2 = {ratio:g}")
        inside = (values >= 0) & (values <= 1)
        traces.fill_between(np.arange(len(values)), 0, inside, step="mid", color=BLUE, alpha=0.12, lw=0)
        traces.set(title="The same series, three leaks (shaded: inside)", xlabel="step", ylabel="h")
        traces.legend(loc="upper right", fontsize=8)
    return figure


def draw_sensitivity(curves: dict[str, np.ndarray]) -> Figure:
    """|dh_T / dx_1| on a logarithmic scale."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.8))
        axes = figure.add_subplot(title="What is left of the first input", xlabel="steps later", ylabel="|dh / dx|")
        for colour, (name, values) in zip(PALETTE, curves.items()):
            axes.plot(np.arange(len(values)), values, color=colour, lw=2, label=name)
        axes.set_yscale("log")
        axes.grid(alpha=0.15)
        axes.legend(loc="lower left", fontsize=8)
    return figure


def draw_gate(values: torch.Tensor, writes: torch.Tensor, held: dict[str, torch.Tensor]) -> Figure:
    """What comes in, when the gate opens, and what the unit holds."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.2))
        axes = figure.add_subplot(
            title="One unit: what could be written, and what is held", xlabel="step", ylabel="value"
        )
        axes.plot(torch.tanh(0.5 * values).numpy(), color=INK, lw=0.8, alpha=0.6, label="what could be written")
        for colour, (name, states) in zip((ORANGE, GREEN), held.items()):
            axes.step(np.arange(len(states)), states.detach().numpy(), where="post", color=colour, lw=2, label=name)
        for place in torch.nonzero(writes).flatten().tolist():
            axes.axvline(place, color=BLUE, lw=1, ls=":")
        axes.legend(loc="upper right", fontsize=8)
    return figure


def draw_grus(states: dict[str, np.ndarray]) -> Figure:
    """One unit of the two gated cells with the same numbers in both."""
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 3.0))
        axes = figure.add_subplot(title="The same weights in both cells", xlabel="step", ylabel="h, first unit")
        for colour, style, (name, trace) in zip((ORANGE, BLUE, GREEN), ("-", "-", ":"), states.items()):
            axes.plot(trace, color=colour, lw=2, ls=style, label=name)
        axes.legend(loc="best", fontsize=8)
    return figure


def draw_gated_counter(values: np.ndarray, layers: list[np.ndarray], counts: np.ndarray) -> Figure:
    """The five units of the hand-made gated counter over one series."""
    rows = np.concatenate([layer[0] for layer in layers], -1).T
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 4.4))
        series, strips, count = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 1.4))
        draw_series(series, values)
        series.set(title="Five gated units made by hand")
        strips.imshow(rows, aspect="auto", cmap="coolwarm", interpolation="nearest", vmin=-1, vmax=1)
        strips.set_yticks(range(len(rows)), ["above 0", "below 1", "inside", "was inside", "count"])
        count.step(np.arange(len(values)), counts, where="post", color=ORANGE, lw=1.8)
        count.set(xlabel="step", ylabel="read as")
    return figure
