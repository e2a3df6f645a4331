"""What `expire-span analyse` wrote into a run folder, as tables and pictures of the report."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from expire_span.disk.files import read_json
from expire_span.runs import RunFolder, UserError
from expire_span.tasks.signs import show_line

ANALYSIS, FORMAT = "analysis.json", 1
"""The file, and the version of it that is read."""
PICTURES = {
    "classes": "Mean span of each class of letters, one row a layer; the colour compares it with the layer's own mean.",
    "replaced": "Spans of a word's letters before and after other words take its place; lines are 95% intervals over passages.",
    "cut": "What letters cost more, by class, where no memory may live longer than a limit; lines are 95% intervals.",
}
"""Pictures that lie beside the file, by name, and what each shows."""

Cell = str | tuple[str, str, str]
"""Text, or a letter with the text before and after it: (before, letter, after)."""


@dataclass(frozen=True)
class Table:
    title: str
    headings: list[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True)
class Findings:
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[str, str]] = field(default_factory=list)
    """Caption and picture, the latter as a data URL."""
    told: str = ""
    """A sentence about what was analysed, or why it cannot be shown."""


def read_findings(run: RunFolder) -> Findings:
    """The analysis of a run; empty if there is none, and a sentence in `told` if it cannot be read."""
    path = run.path / ANALYSIS
    if not path.is_file():
        return Findings()
    again = f"make it again with: expire-span analyse {run.name}"
    try:
        found = read_json(path)
        if found.get("format") != FORMAT:
            return Findings(told=f"{path} has format {found.get('format')!r}, this version reads {FORMAT}; {again}.")
        tables = [table for make in (_classes, _replaced, _cuts, _longest, _worst) if (table := make(found))]
        told = f"Read from {int(found['tokens']):,} letters, memory carried."
    except (UserError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        return Findings(told=f"{path} is not an analysis that this version can read ({error}); {again}.")
    return Findings(tables, _pictures(run), told)


def _pictures(run: RunFolder) -> list[tuple[str, str]]:
    paths = {name: run.path / f"analysis_{name}.png" for name in PICTURES}
    packed = {name: base64.b64encode(path.read_bytes()).decode() for name, path in paths.items() if path.is_file()}
    return [(PICTURES[name], f"data:image/png;base64,{data}") for name, data in packed.items()]


def _classes(found: dict[str, Any]) -> Table:
    first = found["layers"][0]["classes"]
    rows = [_layer_row(layer) for layer in found["layers"]]
    counted = ["letters seen", *(f"{row['count']:,}" for row in first), f"{int(found['tokens']):,}"]
    return Table(
        "Mean span by class of letter, in steps", ["layer", *_names(first), "all"], [[str(x) for x in counted], *rows]
    )


def _layer_row(layer: dict[str, Any]) -> list[str]:
    return [str(layer["layer"]), *(f"{row['mean']:.1f}" for row in layer["classes"]), f"{layer['mean']:.1f}"]


def _names(rows: list[dict[str, Any]]) -> list[str]:
    return [str(row["class"]) for row in rows]


def _replaced(found: dict[str, Any]) -> Table | None:
    replaced = found["replaced"]
    if replaced is None:
        return None
    words = replaced["words"]
    rows = [[str(same[0]["layer"]), *map(_interval, same)] for same in zip(*(word["layers"] for word in words))]
    title = f"Mean span where “{replaced['word']}” stood, over {replaced['passages']} passages"
    return Table(title, ["layer", *(str(word["word"]) for word in words)], rows)


def _interval(row: dict[str, Any]) -> str:
    return f"{row['mean']:.1f} ({row['low']:.1f} to {row['high']:.1f})"


def _cuts(found: dict[str, Any]) -> Table | None:
    if not found["cut"]:
        return None
    rows = [
        [
            f"{cut['limit']:g}",
            *(f"{row['mean']:+.4f}" for row in cut["classes"]),
            f"{cut['bits_cut'] - cut['bits']:+.4f}",
        ]
        for cut in found["cut"]
    ]
    return Table("Bits more a letter where spans are cut", ["limit", *_names(found["cut"][0]["classes"]), "all"], rows)


def _longest(found: dict[str, Any]) -> Table:
    """Table of the letters that live longest, over all layers, each with its surroundings."""
    entries = [(layer["layer"], entry) for layer in found["layers"] for entry in layer["longest"]]
    return _places("Letters that live longest", "layer", "span", entries, lambda entry: f"{entry['span']:.0f}")


def _worst(found: dict[str, Any]) -> Table | None:
    entries = [(f"{cut['limit']:g}", entry) for cut in found["cut"] for entry in cut["worst"]]
    show: Callable[[dict[str, Any]], str] = lambda entry: f"{entry['bits']:+.2f}"  # noqa: E731
    return _places("Letters that lose most by a cut", "limit", "bits more", entries, show) if entries else None


def _places(
    title: str, group: str, measure: str, entries: list[tuple[Any, dict[str, Any]]], show: Callable[[Any], str]
) -> Table:
    rows: list[list[Cell]] = [[str(name), _around(entry), show(entry)] for name, entry in entries]
    return Table(title, [group, "letter in its place", measure], rows)


def _around(entry: dict[str, Any]) -> tuple[str, str, str]:
    before, letter, after = (show_line(str(part)) for part in entry["around"])
    return before, letter, after
