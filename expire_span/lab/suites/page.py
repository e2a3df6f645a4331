"""What a suite leaves: a table on the terminal, NAME.json with scores and samples, and NAME.html, one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from expire_span import __version__
from expire_span.disk.files import to_json, write_atomic
from expire_span.view.assets import environment
from expire_span.view.pictures import draw_trade, to_svg

from .prompts import Sample
from .record import PERPLEXITY, Record, key_of, read_rivals
from .summary import Row, averaged, show_interval, summarise, tabulate

SHOWN = 2
"""Number of prompts of each task whose answers the page shows."""
ENDING = 300
"""Number of characters of a context's beginning that the page shows."""


def write_results(out: Path, record: Record, samples: Sequence[Sample]) -> list[Path]:
    """Print the table, and write NAME.json and NAME.html; answers of other programs to the same prompts stand beside ours."""
    asked = {(x.prompt.task, x.prompt.index) for x in samples}
    lines = [*record.rows.values(), *read_rivals(out)]
    lines = [x for x in lines if x["task"] == PERPLEXITY or (x["task"], x["index"]) in asked]
    rows = summarise(lines)
    print_table(rows)
    numbers, page = out.with_name(out.name + ".json"), out.with_name(out.name + ".html")
    table = [asdict(row) for row in rows]
    answers = sorted(lines, key=lambda x: tuple(map(str, key_of(x))))
    write_atomic(numbers, to_json({"settings": record.settings, "rows": table, "answers": answers}))
    write_atomic(page, render(rows, record.settings, samples, lines).encode())
    return [numbers, page]


def print_table(rows: Sequence[Row]) -> None:
    """The first columns of the table, and perplexities where there are any."""
    heading, *body = tabulate(rows)
    chosen = [n for n, name in enumerate(heading) if n < 7 or name == PERPLEXITY]
    cells = [[line[n] for n in chosen] for line in (heading, *body)]
    widths = [max(len(line[n]) for line in cells) for n in range(len(chosen))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def render(rows: Sequence[Row], settings: dict[str, Any], samples: Sequence[Sample], lines: Sequence[dict]) -> str:
    tasks = list(dict.fromkeys(task for row in rows for task in row.scores))
    page: dict[str, Any] = {"version": __version__, "settings": settings, "table": tabulate(rows)}
    page |= {"tasks": averaged(tasks), "headline": tell_headline(rows), "curves": draw_curves(rows)}
    page["perplexity"] = [(x.name, show_interval(x.loss_difference, 1, 4)) for x in rows if x.method != "none"]
    page["perplexity"] = [x for x in page["perplexity"] if x[1]]
    page["rivals"] = sorted({x["versions"] for x in lines if "versions" in x})
    page["samples"] = [_show_sample(x, lines) for x in samples if x.prompt.index < SHOWN]
    return environment("lab/suites").get_template("suites.html").render(page)


def tell_headline(rows: Sequence[Row]) -> str:
    """The best method at the smallest budget, in a sentence."""
    rivals = [x for x in rows if x.method != "none" and x.average is not None]
    if not rivals:
        return ""
    least = min(x.budget for x in rivals)
    best = max((x for x in rivals if x.budget == least), key=lambda x: x.average or 0.0)
    full = next(
        (f", the full cache {100 * x.average:.1f}" for x in rows if x.method == "none" and x.average is not None), ""
    )
    return (
        f"At {100 * least:g}% of the cache, {best.method} scores highest: {100 * (best.average or 0):.1f} of 100{full}."
    )


def draw_curves(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Score against bytes: bytes of the memories that were kept, and bytes that the cache's tensors took."""
    drawn = []
    for n, (told, size) in enumerate(
        (
            ("Mean bytes of the memories that were left of a context. Better is up and to the left.", "kept_bytes"),
            ("Mean bytes of the cache's tensors after the context: what was really held.", "held_bytes"),
        )
    ):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row.average is not None:
                name = "full cache" if row.method == "none" else row.method
                series.setdefault(name, []).append((getattr(row, size) / 2**20, 100 * row.average))
        if series:
            figure = draw_trade(
                dict(series), title="Score against bytes", xlabel="MiB a context", ylabel="average score"
            )
            drawn.append((told, to_svg(figure, f"suite{n}")))
    return drawn


def _show_sample(sample: Sample, lines: Sequence[dict]) -> dict[str, Any]:
    prompt = sample.prompt
    here = [x for x in lines if x["task"] == prompt.task and x["index"] == prompt.index]
    answers = [(_name(x), f"{100 * x['score']:.0f}", x.get("answer", "")) for x in here]
    shown = {
        "task": prompt.task,
        "index": prompt.index,
        "context": prompt.context[:ENDING],
        "tokens": len(sample.context),
    }
    return shown | {
        "question": prompt.question + prompt.prefix,
        "wanted": ", ".join(prompt.answers),
        "answers": answers,
    }


def _name(line: dict) -> str:
    return "full cache" if line["method"] == "none" else f"{line['method']} {line['budget']:g}"
