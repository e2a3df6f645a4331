"""Figures of the memory systems, measured on untrained layers: bytes and time as a stream grows, and attention patterns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torch import Tensor, nn

from expire_span.models.mixer import Mixer, build_mixer
from expire_span.models.systems import SYSTEMS, LayerShape, Recipe
from expire_span.models.systems.expire_span import ExpireSpanConfig

MEMORIES = 128
"""Number of memories to which systems are set where they have such a setting; learned spans start there."""
BLOCK = 128
"""Number of tokens that are read in one call."""
SHAPE = LayerShape(dim=64, heads=4)
PATTERN_SHAPE = LayerShape(dim=32, heads=4, kv_heads=2)
STEPS = 64
"""Number of steps in an attention pattern."""
FAINTEST = 1e-4
"""Weights below this share of a query's largest are not drawn."""


def _settings(kind: str, memories: int) -> Any:
    """Settings of a system for `memories` memories; learned spans start there."""
    spans = ExpireSpanConfig(max_span=8 * memories, ramp=memories // 8, initial_span=0.125)
    rule = SYSTEMS[kind].budget.settings
    recipe = Recipe(1, spans.max_span, spans.ramp, spans.initial_span, spans)
    return rule(recipe, memories) if rule is not None else SYSTEMS[kind].settings()


@torch.no_grad()
def measure_growth(kind: str, lengths: Sequence[int]) -> dict[str, Any]:
    """Measured bytes that a layer holds for one row after each number of steps, and milliseconds for reading the last block."""
    torch.manual_seed(0)
    layer = build_mixer(SHAPE, _settings(kind, MEMORIES)).eval()
    x = torch.randn(1, BLOCK, SHAPE.dim)
    layer(x)  # a warm-up call, which is not measured
    state, held, times, recent = layer.initial_state(1, "kv"), [], [], []
    for n in range(1, max(lengths) // BLOCK + 1):
        start = time.perf_counter()
        _, state, aux = layer(x, state)
        recent.append(1e3 * (time.perf_counter() - start))
        if n * BLOCK in lengths:
            held.append(aux.bytes_held)
            times.append(min(recent[-max(n // 8, 3) :]))  # the minimum, since other programs can only add to it
    return {"system": kind, "lengths": list(lengths), "bytes": held, "ms_per_block": times}


def measure_all(longest: int, kinds: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Every system at lengths that double, from two blocks on."""
    lengths = [length for length in (BLOCK * 2**n for n in range(1, 20)) if length <= max(longest, 2 * BLOCK)]
    return [measure_growth(kind, lengths) for kind in kinds or SYSTEMS]


def draw_system_growth(rows: list[dict[str, Any]]) -> Figure:
    """Bytes held, and time of a block, one line a system: a point a length of the stream, from pale (short) to dark (long).
    Systems with the same figures lie below each other, not on top of each other."""
    rows = sorted(rows, key=lambda row: (row["bytes"][-1], row["system"]), reverse=True)
    lengths = rows[0]["lengths"]
    figure = Figure(figsize=(7.2, 1.2 + 0.2 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    shades = colormaps["Blues"](np.linspace(0.3, 1, len(lengths)))
    for axes, name in ((left, "bytes"), (right, "ms_per_block")):
        for place, row in enumerate(rows):
            axes.plot(row[name], [place] * len(lengths), color="0.8", lw=1, zorder=1)
            axes.scatter(row[name], [place] * len(lengths), c=shades, s=18, zorder=2)
        axes.set(xscale="log")
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="y", color="0.92", lw=0.6)
        axes.set_axisbelow(True)
    left.set(yticks=range(len(rows)), xlabel="bytes held (lower is better)")
    left.set_yticklabels([row["system"] for row in rows], fontsize=7)
    left.set_ylim(len(rows) - 0.4, -0.6)
    right.set(xlabel=f"ms for {BLOCK} steps (lower is better)")
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # times lie close together, often within one power of ten
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for length, shade in zip(lengths, shades):
        left.scatter([], [], color=shade, s=18, label=f"{length:,}")
    figure.legend(
        loc="outside upper center", ncols=min(len(lengths), 7), fontsize=7, title="steps read", title_fontsize=7
    )
    return figure


def measure_pattern(kind: str, steps: int = STEPS) -> np.ndarray:
    """How much each output [row] depends on each input [column] of one untrained layer, as a share of the row's largest."""
    torch.manual_seed(0)
    system = SYSTEMS[kind]
    layer = build_mixer(PATTERN_SHAPE, system.settings(**system.example)).double().eval()
    _spread_spans(layer)
    x = torch.randn(1, steps, PATTERN_SHAPE.dim, dtype=torch.float64, requires_grad=True)
    y = layer(x).y[0]  # [T, C]
    direction = torch.randn(PATTERN_SHAPE.dim, dtype=torch.float64)
    rows = [_influence(y[t] @ direction, x) for t in range(steps)]
    found = torch.stack(rows)
    return (found / found.amax(1, keepdim=True).clamp_min(1e-300)).numpy()


def _influence(output: Tensor, x: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(output, x, retain_graph=True)
    return gradient[0].norm(dim=-1)


def _spread_spans(layer: Mixer) -> None:
    """Make the spans of an untrained layer differ between tokens, as those of a trained layer do."""
    weight = getattr(getattr(layer, "span_predictor", None), "weight", None)
    if isinstance(weight, nn.Parameter):
        nn.init.normal_(weight, std=0.4)


def draw_patterns(patterns: dict[str, np.ndarray]) -> Figure:
    """One square a system: a row is a step, a column what it reads, and darkness how much."""
    columns = min(5, max(len(patterns), 1))
    rows = -(-len(patterns) // columns)
    figure = Figure(figsize=(1.45 * columns, 1.6 * rows), layout="constrained")
    for place, (kind, weights) in enumerate(patterns.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(kind, fontsize=7)
        shade = np.log10(np.maximum(weights, FAINTEST))
        axes.imshow(shade, cmap="Blues", vmin=np.log10(FAINTEST), vmax=0, interpolation="nearest")
        axes.set(xticks=[], yticks=[])
    figure.supxlabel("what is read (earlier steps to the left)", fontsize=7)
    figure.supylabel("step that reads", fontsize=7)
    return figure
