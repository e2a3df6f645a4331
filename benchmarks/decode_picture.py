"""The figures of `benchmarks.decode` as a picture: `python -m benchmarks.decode_picture benchmarks/out/decode.json`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: Path) -> None:
    """Time per token by batch size on the left, bytes held on the right, both on logarithmic scales."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    names = sorted({_name(row) for row in rows}, key=lambda name: (not name.startswith("ours"), name))
    batches = sorted({row["batch"] for row in rows})
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
    for axes, title, value in ((left, "ms a token", lambda r: r["ms"]["median"]), (right, "MiB held", _mebibytes)):
        for n, name in enumerate(names):
            found = {row["batch"]: value(row) for row in rows if _name(row) == name}
            places = [batches.index(batch) + n / (len(names) + 1) for batch in found]
            axes.bar(places, list(found.values()), width=1 / (len(names) + 1), label=name)
        axes.set_xticks([n + 0.4 for n in range(len(batches))], [f"batch {batch}" for batch in batches])
        axes.set_yscale("log")
        axes.set_title(title)
    left.legend(fontsize=8)
    figure.suptitle(f"Decoding on {result['environment']['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _name(row: dict[str, Any]) -> str:
    if row["system"] == "ours":
        return "ours"
    return row["system"] if row["system"].startswith("ring") else f"{row['system']}, {row['slots']} tokens"


def _mebibytes(row: dict[str, Any]) -> float:
    return row["bytes_held"] / 2**20


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/img/decode.png"))
    args = parser.parse_args(argv)
    draw(json.loads(args.json.read_text()), args.out)
    print("written to", args.out)


if __name__ == "__main__":
    main()
