"""`expire-span study entrances`: memories made by hand, and memories learned, on the counting of entrances."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expire_span.checks import Count, checked

from .exercise import SOLVED, TRAINED, Size, measure, train_size
from .expire import Model, train_model
from .folder import StudyFolder
from .gating import read_count, run_counter
from .page import write_page
from .pool import run_jobs
from .sections import handmade
from .sections.learned import learned

LEAD = (
    "A series of numbers comes in, one a step; how often has it entered the interval from 0 to 1? Answering takes a "
    "memory of two things: was I inside just now, and how many entrances were there. This page begins with memories "
    "made by hand, shows what makes them leak and what a gate does about it, and ends with networks that had to find "
    "all this by themselves, from random weights."
)


@dataclass(frozen=True)
@checked
class EntrancesSettings:
    """Which networks and decoders are trained; saved as the settings of the study folder."""

    layers: tuple[Count, ...] = (1, 2, 3)
    units: tuple[Count, ...] = (2, 4, 8, 16, 32)
    seeds: Count = 5
    steps: Count = 800
    decoders: tuple[tuple[str, int], ...] = (("expire_span", 2), ("gru", 1))
    """Memory systems of the decoders, with the number of seeds of each."""
    decoder_steps: Count = 800

    @classmethod
    def quick(cls, seeds: int = 2) -> EntrancesSettings:
        """Settings that take half a minute: few sizes and few steps, so that most networks do not solve the task."""
        return cls((1, 2), (4, 16), seeds, 200, (("expire_span", 1),), 100)

    @property
    def jobs(self) -> list[Size | Model]:
        sizes = [Size(depth, width, self.seeds, self.steps) for depth in self.layers for width in self.units]
        decoders = [Model(kind, self.decoder_steps, seed) for kind, seeds in self.decoders for seed in range(seeds)]
        return [*sizes, *decoders]


def run_job(job: Size | Model, folder: StudyFolder, tick: Callable[[float], None]) -> dict[str, Any]:
    """One cell of the study, in a process of its own."""
    if isinstance(job, Size):
        return train_size(job, tick)
    return train_model(job, folder.path / "runs", tick)


def run_study(settings: EntrancesSettings, out: Path, processes: int) -> tuple[Path, dict[str, Any]]:
    """Run the cells that are not finished, then write study.json and report.html; returns the page and the numbers."""
    begin = time.perf_counter()
    folder = StudyFolder.open(out, "entrances", asdict(settings))
    found = run_jobs(run_job, settings.jobs, folder, processes)
    cells = [found[job.name] for job in settings.jobs if isinstance(job, Size)]
    models = [found[job.name] for job in settings.jobs if isinstance(job, Model)]
    by_hand = measure(lambda values: read_count(run_counter(values)))
    numbers = handmade.measure_all()
    quick = settings.steps <= EntrancesSettings.quick().steps
    result = {
        "study": "entrances",
        "settings": asdict(settings),
        "quick": quick,
        "solved_means": SOLVED,
        "trained_length": TRAINED,
    }
    result |= {"by_hand": numbers | {"gated_counter": by_hand}, "exercise": cells, "decoders": models}
    result["seconds"] = {
        "all_cells": sum(part["seconds"] for part in found.values()),
        "this_call": time.perf_counter() - begin,
    }
    folder.write_result(result)
    write_page(
        folder.path / "report.html",
        title="Counting entrances",
        lead=LEAD,
        headline=tell_headline(result),
        quick=quick,
        facts=collect_facts(result),
        sections=[*handmade.draw_all(numbers), *learned(result)],
    )
    return folder.path, result


def collect_facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The few numbers at the head of the page, and of what the command prints."""
    cells, by_hand = result["exercise"], result["by_hand"]["gated_counter"]
    smallest = min((cell for cell in cells if cell["solved"] == 1), key=lambda cell: cell["weights"], default=None)
    longest = list(by_hand["lengths"])[-1]
    facts = [
        ("wrong counts of five units made by hand, 4 times as long", f"{by_hand['lengths'][longest]['all'][0]:.1%}")
    ]
    if smallest:
        size = f"{smallest['size']['layers']} x {smallest['size']['units']}"
        facts.append(("smallest layers x units that every seed solved", size))
    facts.append(
        ("networks that solved it", f"{np.mean([cell['solved'] for cell in cells]):.0%} of {_networks(cells)}")
    )
    for mixer in dict.fromkeys(model["mixer"] for model in result["decoders"]):
        errors = [m["lengths"][str(TRAINED)]["last"][0] for m in result["decoders"] if m["mixer"] == mixer]
        facts.append((f"wrong last counts of the {mixer} decoder", f"{np.mean(errors):.1%}"))
    return facts


def tell_headline(result: dict[str, Any]) -> str:
    """What was made by hand beside what was learned, in one sentence."""
    cells, by_hand = result["exercise"], result["by_hand"]["gated_counter"]
    wrong = by_hand["lengths"][list(by_hand["lengths"])[-1]]["all"][0]
    solved = np.mean([cell["solved"] for cell in cells])
    return (
        f"Five units made by hand miscount {wrong:.1%} of the entrances in series four times as long as in training; of "
        f"{_networks(cells)} trained networks, {solved:.0%} solved the task."
    )


def _networks(cells: list[dict[str, Any]]) -> int:
    return sum(cell["size"]["seeds"] for cell in cells)
