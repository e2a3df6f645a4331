"""Draw docs/img/study_*.png from finished studies: python -m benchmarks.study_pictures ENTRANCES_FOLDER WORD_RNN_FOLDER."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from expire_span.lab.study import charts
from expire_span.lab.study.sections import handmade, learned, words
from expire_span.view.pictures import STYLE

IMAGES = Path(__file__).parent.parent / "docs" / "img"
HAND_MADE = {1: "counter", 3: "stack", 4: "leak", 5: "sensitivity", 8: "gated_counter"}
"""The pictures of the hand-made memories in docs/recurrent.md, by their place on the study's page."""


def save(figure: Figure, name: str) -> None:
    with rc_context(STYLE):
        figure.savefig(IMAGES / f"study_{name}.png", dpi=90, bbox_inches="tight", facecolor="white")


def draw_entrances(folder: Path) -> None:
    result = json.loads((folder / "study.json").read_bytes())
    for place, section in enumerate(handmade.draw_all(result["by_hand"]), 1):
        if place in HAND_MADE:
            save(section.pictures[0][1], HAND_MADE[place])
    save(charts.draw_table(result["exercise"], result["trained_length"]), "sizes")
    save(charts.draw_lengths(learned.systems_of(result)), "lengths")


def draw_words(folder: Path) -> None:
    heat, stretches = words.draw_sections(json.loads((folder / "study.json").read_bytes()))
    save(heat.pictures[0][1], "heat_trained")
    save(heat.pictures[1][1], "heat_untrained")
    save(stretches.pictures[0][1], "stretches")


if __name__ == "__main__":
    draw_entrances(Path(sys.argv[1]))
    draw_words(Path(sys.argv[2]))
