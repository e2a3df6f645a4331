"""`expire-span figure NAME RUN`: one figure, ready for a paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, nearest, parse

NAMES = ("spans", "timeline", "tokens", "growth")
"""Kept here too, so that a wrong name is answered without loading what draws."""


@dataclass(frozen=True)
class FigureCommand:
    """Write a figure of what a run's model remembers: spans (histogram), timeline, tokens, growth."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """spans, timeline, tokens or growth."""
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|TRACE")]
    """Name or folder of a run, whose sample is read, or a trace file."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    out: Path | None = None
    """File to write, .pdf, .png or .svg; None is NAME.pdf."""


def run_figure(args: list[str]) -> int:
    command = parse(FigureCommand, args, f"{PROGRAM} figure")
    if command.name not in NAMES:
        raise UserError(f"unknown figure {command.name!r}; {nearest(command.name, list(NAMES))}")
    run = None if Path(command.run).is_file() else find_run(command.run, command.runs_dir)
    from expire_span.view.figures import write_figure
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    trace = Trace.load(Path(command.run)) if run is None else Trace.of(open_reader(run).trace_sample())
    out = command.out or Path(f"{command.name}.pdf")
    write_figure(command.name, trace, out)
    print(out)
    return 0
