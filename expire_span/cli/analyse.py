"""`expire-span analyse RUN`: what a model of text keeps, why, and what a shorter memory costs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from expire_span.checks import at_least
from expire_span.runs import UserError, find_run
from expire_span.shipped import SAMPLE

from .parsing import PROGRAM, parse, read_text_option
from .runs import with_data


@dataclass(frozen=True)
class Analyse:
    """Analyse a run of text: which letters live longest, what a word's span depends on, what shorter memory costs."""

    run: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = None
    """Name or folder of a run on text or books, with learned spans; without it, the model that ships with the package."""
    runs_dir: Path = Path("runs")
    """Folder that holds the run folders."""
    tokens: Annotated[int, at_least(2)] = 32_768
    """Number of letters of the test split that are read, memory carried."""
    word: str | None = None
    """Word that is replaced; None takes Egypt where the text has it, else the commonest name."""
    limits: str | None = None
    """Longest spans to try, like 1024,256; None takes a 16th, a 64th and a 256th of max_span."""
    path: str | None = None
    """The run's data, where it has moved; its test split is read."""
    text: Path | None = None
    """File of text to read in place of the test split; a model without its data reads the sample in its folder."""
    out: Path | None = None
    """Folder for analysis.json and the pictures; None is the run folder, where the report finds them, and for the model that
    ships with the package the folder analysis."""
    device: str = "auto"
    """cpu, cuda, or auto."""


def run_analyse(args: list[str]) -> int:
    command = parse(Analyse, args, f"{PROGRAM} analyse")
    limits = parse_limits(command.limits)
    run = find_run(command.run, command.runs_dir)
    raw = None if command.text is None else read_text_option(command.text)
    from expire_span.lab.analyse.analysis import analyse, write_analysis
    from expire_span.train.devices import check_device

    device = check_device(command.device)
    if command.path is not None or (raw is None and not (run.path / SAMPLE).is_file()):
        run = with_data(run, command.path)
    found = analyse(run, count=command.tokens, word=command.word, limits=limits, device=device, raw=raw)
    show(found)
    folder = command.out or (Path("analysis") if run.is_shipped else run.path)
    print("\n".join(str(path) for path in write_analysis(folder, found)))
    return 0


def parse_limits(text: str | None) -> list[float]:
    """Limits as the command line has them; an empty list is the default."""
    try:
        limits = [float(word) for word in text.split(",")] if text is not None else []
    except ValueError as error:
        raise UserError(f"--limits are numbers of steps, like 1024,256, got {text!r}") from error
    for limit in limits:
        if not 0 <= limit < float("inf"):
            raise UserError(f"a limit of --limits must be 0 or more and finite, got {limit:g}")
    return limits


def show(found: dict[str, Any]) -> None:
    """The answers as three small tables."""
    classes = found["layers"][0]["classes"]
    heading = "".join(f"{row['class']:>10}" for row in classes) + f"{'all':>10}"
    print(f"mean span by class of letter, over {found['tokens']:,} letters, and half of its 95% interval")
    print(f"layer  {heading}")
    print("count  " + "".join(f"{row['count']:>10,}" for row in classes))
    for layer in found["layers"]:
        means = "".join(_cell(row, ".1f") for row in layer["classes"])
        print(f"{layer['layer']:<7}{means}{layer['mean']:>10.1f}")
        _show_intervals(layer["classes"], ".1f")
    if found["replaced"] is not None:
        _show_replaced(found["replaced"])
    _show_cuts(found["cut"], heading)


def _cell(row: dict[str, Any], form: str) -> str:
    """The mean of a class; a dash where no letter belongs to it."""
    return f"{format(row['mean'], form) if row['count'] else '-':>10}"


def _show_intervals(rows: list[dict[str, Any]], form: str, width: int = 10) -> None:
    """Half of the 95% interval below each mean, where any is wide enough to be seen."""
    halves = [format((row["high"] - row["low"]) / 2, form) if row["count"] else "" for row in rows]
    if any(float(half or 0) for half in halves):
        print(" " * 7 + "".join(f"{'±' + half if half else '':>{width}}" for half in halves))


def _show_replaced(replaced: dict[str, Any]) -> None:
    from expire_span.lab.analyse.pictures import tell_passages

    words = replaced["words"]
    print(f"\nmean span where {words[0]['word']} stood, over {tell_passages(replaced['passages'])}")
    print("layer  " + "".join(f"{word['word']:>16}" for word in words))
    for rows in zip(*(word["layers"] for word in words)):
        print(f"{rows[0]['layer']:<7}" + "".join(f"{row['mean']:>16.1f}" for row in rows))
        _show_intervals(list(rows), ".1f", width=16)


def _show_cuts(cuts: list[dict[str, Any]], heading: str) -> None:
    print("\nbits more a letter where spans are cut")
    print(f"limit  {heading}")
    for cut in cuts:
        means = "".join(_cell(row, "+.4f") for row in cut["classes"])
        print(f"{cut['limit']:<7g}{means}{cut['bits_cut'] - cut['bits']:>+10.4f}")
        _show_intervals(cut["classes"], ".4f")
