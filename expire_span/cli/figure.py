"""`expire-span figure NAME RUN`: one figure, ready for a paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from expire_span.checks import between
from expire_span.disk.files import check_output, to_json, write_output
from expire_span.models.systems import SYSTEMS
from expire_span.runs import RunFolder, UserError, find_run

from .parsing import PROGRAM, nearest, parse, read_text_option

SHOWN = 4096
"""Number of tokens of the sample in a figure that compares two traces."""
NAMES = ("spans", "timeline", "tokens", "growth", "ages", "layers", "words", "cut", "patterns")
"""Names of the figures. They are repeated here so that a wrong name is refused without loading matplotlib."""
PAIRED = ("words", "cut")
"""Figures that need a model, since they compare what it does with two texts or two memories."""
KINDS = (".pdf", ".png", ".svg")
"""Endings of the files that figures are written into."""
OF_SYSTEMS = ("growth", "patterns")
"""Figures that without a run are measured on an untrained layer of each memory system."""
READERS = ("spans", "timeline", "tokens", "growth", "ages", "layers", "words", "cut")
"""Figures that can be drawn of a run."""
OPTIONS = {
    "text": READERS, "word": ("words",), "others": ("words",), "max_span": ("cut",), "live": ("cut",), "needed": ("ages",),
    "mixers": OF_SYSTEMS, "longest": ("growth",),
}  # fmt: skip
"""The figures in which an option counts; elsewhere it is refused, since it would change nothing."""
OLDEST = 2**40
"""Largest value of --needed."""
MOST_STEPS = 2**20
"""Largest value of --longest: systems that never forget read all steps at every step."""
STORY = "The king of Egypt went down to the river. Nobody saw him go, and nobody in Egypt asked where he was. " * 2
"""The text of the figure `words`, where none is given."""


@dataclass(frozen=True)
class FigureCommand:
    """Write a figure of what a run's model remembers.

    spans (histogram), timeline, tokens, growth, ages (at which memories die), layers (one text layer by layer), words (a word
    replaced by others), cut (which tokens get worse when lives are cut). Without a run, growth is of every memory system (bytes
    and time against length, measured), and so is patterns (who reads whom).
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """spans, timeline, tokens, growth, ages, layers, words, cut or patterns."""
    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN|TRACE]")] = None
    """Name or folder of a run, whose sample is read, or a trace file; without it, the model that ships with the package."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    out: Path | None = None
    """File to write, .pdf, .png or .svg; None is NAME.pdf."""
    text: Path | None = None
    """File to read in place of the sample; a figure of words needs one that holds the word."""
    word: str = "Egypt"
    """Of words: the word that is replaced."""
    others: str = "somewhere,Humpty Dumpty"
    """Of words: what it is replaced by, with commas between."""
    max_span: float | None = None
    """Of cut: the longest span; None is 1/16 of the model's own, unless --live is given."""
    live: float | None = None
    """Of cut: a budget of memories alive on average."""
    needed: Annotated[int, between(0, OLDEST)] | None = None
    """Of ages: an age that memories must reach, drawn as a line; in popgym's RepeatPrevious it is k - 1."""
    mixers: str = ""
    """Memory systems of growth and patterns without a run, like full,expire_span; all of them where none is named."""
    longest: Annotated[int, between(1, MOST_STEPS, unit=" steps")] = 8192
    """Steps up to which growth without a run is measured."""


def run_figure(args: list[str]) -> int:
    command = parse(FigureCommand, args, f"{PROGRAM} figure")
    is_trace = command.run is not None and Path(command.run).is_file()
    _check(command, is_trace)
    out = command.out or Path(f"{command.name}.pdf")
    _check_out(out)
    if command.run is None and command.name in OF_SYSTEMS:
        return _figure_of_systems(command, out)
    run = None if is_trace else find_run(command.run, command.runs_dir)
    raw = None if command.text is None else read_text_option(command.text)
    if run is not None and command.name in PAIRED:
        {"cut": _draw_cut, "words": _draw_words}[command.name](command, run, raw, out)
    else:
        _draw_one(command, run, raw, out)
    print(out)
    return 0


def _check(command: FigureCommand, is_trace: bool) -> None:
    name = command.name
    if name not in NAMES:
        raise UserError(f"unknown figure {name!r}; {nearest(name, list(NAMES))}")
    for option, figures in OPTIONS.items():
        if name not in figures and (given := getattr(command, option)) != getattr(FigureCommand, option):
            flag = "--" + option.replace("_", "-")
            raise UserError(
                f"{flag} counts in {' and '.join(figures)} only, got {given} for the figure {name}; leave it out"
            )
    if command.run is not None and name == "patterns":
        raise UserError(f"patterns is a figure of the memory systems and takes no run, got {command.run}")
    if is_trace and name in PAIRED:
        raise UserError(f"the figure {name} compares what a model does; give a run, got the trace {command.run}")


def _check_out(out: Path) -> None:
    if out.suffix.lower() not in KINDS:
        known = ", ".join(KINDS).replace(".", "")
        raise UserError(f"a figure is written as {known}, got {out}; give --out NAME.pdf")
    check_output(out)


def _draw_one(command: FigureCommand, run: RunFolder | None, raw: bytes | None, out: Path) -> None:
    from expire_span.lab.figures.traces import draw_ages, save_figure, write_figure
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    if run is None:
        trace = Trace.load(Path(command.run or ""))
    else:
        reader = open_reader(run)
        trace = Trace.of(reader.trace_sample() if raw is None else reader.trace_text(raw))
    if not len(trace):
        raise UserError(f"the trace {command.run} has a header but no steps, so there is nothing to draw")
    if command.name == "ages":
        save_figure(lambda: draw_ages(trace, command.needed), out)
    else:
        write_figure(command.name, trace, out)


def _draw_cut(command: FigureCommand, run: RunFolder, raw: bytes | None, out: Path) -> None:
    """One text read twice: with the lives that the model gives, and with shorter ones."""
    from expire_span.lab.figures.pairs import draw_cut
    from expire_span.lab.figures.traces import save_figure
    from expire_span.view.limit import Cut
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    Cut(command.max_span, command.live)  # refused before anything is read
    reader = open_reader(run)
    read = lambda cut: Trace.of(reader.trace_sample(SHOWN, cut) if raw is None else reader.trace_text(raw, cut))  # noqa: E731
    before = read(Cut())
    limit = command.max_span
    if limit is None and command.live is None:
        limit = (before.header["max_span"] or 0) / 16
    after = read(Cut(limit, command.live))
    save_figure(lambda: draw_cut(before, after), out)


def _draw_words(command: FigureCommand, run: RunFolder, raw: bytes | None, out: Path) -> None:
    """One text with a word in it, and the same text with other words in its place."""
    from expire_span.lab.figures.pairs import draw_words
    from expire_span.lab.figures.traces import save_figure
    from expire_span.view.source import open_reader
    from expire_span.view.trace import Trace

    reader = open_reader(run)
    text = STORY.encode() if raw is None else raw
    words = [command.word, *(other.strip() for other in command.others.split(",") if other.strip())]
    place = text.find(command.word.encode())
    if place < 0:
        raise UserError(f"the text does not hold the word {command.word!r}; give --word, or another --text")
    traces = [Trace.of(reader.trace_text(text.replace(words[0].encode(), word.encode()))) for word in words]
    places = [(place, place + len(word.encode())) for word in words]
    save_figure(lambda: draw_words(traces, places), out)


def _figure_of_systems(command: FigureCommand, out: Path) -> int:
    """Measure every system, draw, and write the numbers of `growth` beside the picture."""
    kinds = [kind.strip() for kind in command.mixers.split(",") if kind.strip()] or list(SYSTEMS)
    for kind in kinds:
        if kind not in SYSTEMS:
            raise UserError(f"unknown mixer {kind!r}; {nearest(kind, list(SYSTEMS))}")
    from expire_span.lab.figures.systems import draw_patterns, draw_system_growth, measure_all, measure_pattern
    from expire_span.lab.figures.traces import save_figure

    if command.name == "patterns":
        patterns = {kind: measure_pattern(kind) for kind in kinds}
        save_figure(lambda: draw_patterns(patterns), out)
    else:
        rows = measure_all(command.longest, kinds)
        save_figure(lambda: draw_system_growth(rows), out)
        write_output(out.with_suffix(".json"), to_json(rows))
        print(out.with_suffix(".json"))
    print(out)
    return 0
