"""`expire-span figure NAME RUN`: one figure, ready for a paper. `growth` and `patterns` can be of all memory systems."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.files import to_json, write_atomic
from expire_span.models.systems import SYSTEMS
from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, nearest, parse

NAMES = ("spans", "timeline", "tokens", "growth", "patterns")
"""Kept here too, so that a wrong name is answered without loading what draws."""
OF_SYSTEMS = ("growth", "patterns")
"""Figures that need no run: they are measured on an untrained layer of each memory system."""


@dataclass(frozen=True)
class FigureCommand:
    """Write a figure of what a run's model remembers: spans (histogram), timeline, tokens, growth.

    Without a run, growth is of every memory system (bytes and time against length, measured), and so is patterns (who reads
    whom).
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """spans, timeline, tokens, growth or patterns."""
    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|TRACE")] = None
    """Name or folder of a run, whose sample is read, or a trace file; growth and patterns of all systems need none."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    out: Path | None = None
    """File to write, .pdf, .png or .svg; None is NAME.pdf."""
    mixers: str = ""
    """Memory systems of growth and patterns without a run, like full,expire_span; all of them where none is named."""
    longest: int = 8192
    """Steps up to which growth without a run is measured."""


def run_figure(args: list[str]) -> int:
    command = parse(FigureCommand, args, f"{PROGRAM} figure")
    if command.name not in NAMES:
        raise UserError(f"unknown figure {command.name!r}; {nearest(command.name, list(NAMES))}")
    out = command.out or Path(f"{command.name}.pdf")
    if command.run is None:
        return _figure_of_systems(command, out)
    if command.name == "patterns":
        raise UserError(f"patterns is a figure of the memory systems and takes no run, got {command.run}")
    run = None if Path(command.run).is_file() else find_run(command.run, command.runs_dir)
    from expire_span.view.figures import write_figure
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    trace = Trace.load(Path(command.run)) if run is None else Trace.of(open_reader(run).trace_sample())
    write_figure(command.name, trace, out)
    print(out)
    return 0


def _figure_of_systems(command: FigureCommand, out: Path) -> int:
    """Measure every system, draw, and write the numbers of `growth` beside the picture."""
    if command.name not in OF_SYSTEMS:
        raise UserError(f"figure {command.name} needs a run or a trace; only {' and '.join(OF_SYSTEMS)} do without")
    kinds = [kind.strip() for kind in command.mixers.split(",") if kind.strip()] or list(SYSTEMS)
    for kind in kinds:
        if kind not in SYSTEMS:
            raise UserError(f"unknown mixer {kind!r}; {nearest(kind, list(SYSTEMS))}")
    if command.longest < 1:
        raise UserError(f"--longest must be at least 1, got {command.longest}")
    from expire_span.view.figures import check_kind, save_figure
    from expire_span.view.system_figures import draw_patterns, draw_system_growth, measure_all, measure_pattern

    check_kind(out)
    if command.name == "patterns":
        patterns = {kind: measure_pattern(kind) for kind in kinds}
        save_figure(lambda: draw_patterns(patterns), out)
    else:
        rows = measure_all(command.longest, kinds)
        save_figure(lambda: draw_system_growth(rows), out)
        write_atomic(out.with_suffix(".json"), to_json(rows))
        print(out.with_suffix(".json"))
    print(out)
    return 0
