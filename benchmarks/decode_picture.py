"""The figures of `benchmarks.decode` as a picture: `python -m benchmarks.decode_picture benchmarks/out/decode.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KINDS = {"ours": "#1f6f8b", "ring, compiled": "#9aa5b1", "ring, graph": "#c9d1d9", "full, graph": "#d98e4a"}
"""The systems that are drawn, from the top of each batch on, and their colours."""


def draw(result: dict[str, Any], path: Path) -> None:
    """Bars by batch size: milliseconds a token on the left, mebibytes held on the right, both on logarithmic scales."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if row["system"] in KINDS]
    rows.sort(key=lambda row: (row["batch"], list(KINDS).index(row["system"]), row.get("slots", 0)))
    batches = sorted({row["batch"] for row in rows})
    places = [n + 0.8 * batches.index(row["batch"]) for n, row in enumerate(rows)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 0.33 * len(rows) + 1.2), sharey=True)
    panels = ((left, "ms a token", lambda r: r["ms"]["median"]), (right, "MiB held", lambda r: r["bytes_held"] / 2**20))
    for axes, title, value in panels:
        numbers = [value(row) for row in rows]
        bars = axes.barh(places, numbers, color=[KINDS[row["system"]] for row in rows])
        axes.bar_label(bars, [f"{number:,.2f}" if number < 100 else f"{number:,.0f}" for number in numbers], padding=3)
        axes.set_xscale("log")
        axes.set_xlim(min(numbers) / 2, max(numbers) * 4)
        axes.set_title(title, loc="left")
        axes.tick_params(left=False, bottom=False, which="both", labelbottom=False)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    left.set_yticks(places, [_label(row) for row in rows])
    left.invert_yaxis()
    figure.suptitle(f"Decoding on one {result['environment']['device']} (logarithmic scales)", x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(row: dict[str, Any]) -> str:
    names = {
        "ours": f"Expire-Span, {row.get('live', 0):.0f} alive",
        "ring, compiled": f"plain, ring of {row.get('slots', 0):,}, compiled",
        "ring, graph": f"plain, ring of {row.get('slots', 0):,}",
        "full, graph": f"plain, full cache of {row.get('slots', 0):,}",
    }
    return f"batch {row['batch']}: {names[row['system']]}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img/decode.png"))
    args = parser.parse_args(argv)
    draw(json.loads(args.json.read_text()), args.out)
    print("written to", args.out)


if __name__ == "__main__":
    main()
