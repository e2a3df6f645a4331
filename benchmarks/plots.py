"""Draws the figures of benchmarks.attention: `python -m benchmarks.plots attention.json [--out docs/img]`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

NAMES = {"ours": "Expire-Span", "cudnn": "cuDNN, dense", "flash": "flash, dense", "reference": "dense definition"}


def lines(rows: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    """Rows grouped into one line each, sorted along `key`."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        spans = f", {describe(row)}" if row["system"] == "ours" and key == "queries" else ""
        found.setdefault(NAMES[row["system"]] + spans, []).append(row)
    return {name: sorted(group, key=lambda row: row[key]) for name, group in found.items()}


def describe(row: dict[str, Any]) -> str:
    return "all live" if row["share"] == 1 else f"{row['share']:.0%} live on, the rest {row['short']:.0f} steps"


def draw(groups: dict[str, list[dict[str, Any]]], key: str, label: str, title: str, path: Path) -> None:
    """Two panels over the same axis: time, and memory beyond the inputs. A system that does not depend on it is a level
    line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, what in zip(figure.subplots(1, 2), ("forward + backward, ms", "memory beyond the inputs, GiB")):
        for name, rows in groups.items():
            values = [row["both"]["median"] if "ms" in what else row["extra_gib"] for row in rows]
            points = [(row[key], value) for row, value in zip(rows, values) if value is not None]
            if len(points) == 1:
                axes.axhline(points[0][1], label=name, linestyle="--", color="0.3" if "cuDNN" in name else "0.6")
            elif points:
                axes.plot(*zip(*points), label=name, marker="o", linestyle="-" if name.startswith("Expire") else "--")
        axes.set(xscale="log", xlabel=label, ylabel=what)
        if key == "alive" and "GiB" in what:
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    args = parser.parse_args(argv)
    found = json.loads(args.json.read_text())
    where = f"one {found['environment']['device']}, bf16, 8 heads of 64"
    lengths, shares = args.out / "attention_time.png", args.out / "attention_share.png"
    draw(lines(found["lengths"], "queries"), "queries", "tokens", f"Cost against length ({where})", lengths)
    label = "share of query-memory pairs alive"
    draw(lines(found["shares"], "alive"), "alive", label, f"Cost against what lives, 32k tokens ({where})", shares)
    print("drawn:", lengths, shares)


if __name__ == "__main__":
    main()
