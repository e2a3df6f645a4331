"""`expire-span study NAME`: runs an experiment and writes its page and its numbers."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from expire_span.checks import Count
from expire_span.runs import UserError

from .parsing import PROGRAM, nearest, parse, take_name


@dataclass(frozen=True)
class Entrances:
    """Memories made by hand, gated networks of many sizes, and Expire-Span, on the counting of entrances."""

    quick: bool = False
    """Few sizes, few steps: half a minute, and little is learned."""
    jobs: Count | None = None
    """Processes side by side; None takes one per processor."""
    seeds: Count | None = None
    """Random starts of every size; None takes 5 (2 with --quick)."""
    out: Path | None = None
    """Folder of the study; the same command goes on with it. None takes studies/entrances (or entrances-quick)."""


@dataclass(frozen=True)
class WordRNN:
    """A gated word model: for how many words the units of its hidden state stay nearly constant, against an untrained model."""

    path: str = ""
    """A text file; none takes built-in tales."""
    steps: Count = 400
    """Training steps."""
    seeds: Count = 2
    """Random starts."""
    jobs: Count | None = None
    """Processes side by side; None takes one per processor."""
    out: Path = Path("studies/word-rnn")
    """Folder of the study; the same command goes on with it."""


@dataclass(frozen=True)
class Questions:
    """Can memories expire in an encoder, and would penalising ordinary attention weights do the same?"""

    quick: bool = False
    """Few models, few steps: half a minute, and little is learned."""
    jobs: Count | None = None
    """Processes side by side; None takes one per processor."""
    seeds: Count | None = None
    """Random starts of every model; None takes 3 (1 with --quick)."""
    out: Path | None = None
    """Folder of the study; the same command goes on with it. None takes studies/questions (or questions-quick)."""


def run_study(args: list[str]) -> int:
    taken = take_name(args, "study", "name", STUDIES, _usage)
    if taken is None:
        return 0
    name, rest = taken
    if name not in STUDIES:
        near, known = nearest(name, list(STUDIES)), f"known are: {', '.join(STUDIES)}"
        raise UserError(f"unknown study {name!r}; {near if near == known else f'{near} {known}'}")
    return STUDIES[name][1](rest)


def _usage() -> str:
    lines = "\n".join(f"  {name:<12}{text}" for name, (text, _) in STUDIES.items())
    return f"usage: {PROGRAM} study NAME [OPTIONS]\n\nstudies:\n{lines}"


def run_entrances(args: list[str]) -> int:
    command = parse(Entrances, args, f"{PROGRAM} study entrances")
    out = command.out or Path("studies") / ("entrances-quick" if command.quick else "entrances")
    from expire_span.lab.study.entrances import EntrancesSettings, collect_facts, run_study

    quick, seeds = command.quick, command.seeds
    settings = EntrancesSettings.quick(seeds or 2) if quick else EntrancesSettings(seeds=seeds or 5)
    return _show(*run_study(settings, out, _processes(command.jobs)), collect_facts, quick=command.quick)


def run_word_rnn(args: list[str]) -> int:
    command = parse(WordRNN, args, f"{PROGRAM} study word-rnn")
    if command.path and not Path(command.path).is_file():
        raise UserError(f"--path {command.path} is not a file; give a text file, or none for the built-in tales")
    from expire_span.lab.study.word_rnn import WordSettings, collect_facts, run_study

    settings = WordSettings(command.path, command.steps, command.seeds)
    return _show(*run_study(settings, command.out, _processes(command.jobs)), collect_facts)


def run_questions(args: list[str]) -> int:
    command = parse(Questions, args, f"{PROGRAM} study questions")
    out = command.out or Path("studies") / ("questions-quick" if command.quick else "questions")
    from expire_span.lab.study.questions.page import collect_facts
    from expire_span.lab.study.questions.study import QuestionsSettings, run_study

    quick, seeds = command.quick, command.seeds
    settings = QuestionsSettings.quick(seeds or 1) if quick else QuestionsSettings(seeds=seeds or 3)
    return _show(*run_study(settings, out, _processes(command.jobs)), collect_facts, quick=command.quick)


def _processes(jobs: int | None) -> int:
    """How many processes to use; None is one per processor."""
    return jobs or os.cpu_count() or 1


def _show(path: Path, result: dict, collect_facts: Callable[[dict], list[tuple[str, str]]], quick: bool = False) -> int:
    if quick:
        print("This was a quick study (few models, few steps): it shows that all works; its numbers say little.")
    for name, value in collect_facts(result):
        print(f"{value:<14}{name}")
    print(f"{path / 'report.html'}\n{path / 'study.json'}")
    return 0


STUDIES: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    "entrances": ("counting entrances: memories by hand, gated networks, Expire-Span", run_entrances),
    "word-rnn": ("a gated word model: how long its units hold still", run_word_rnn),
    "questions": ("two questions: expiry in an encoder, and a penalty on attention instead", run_questions),
}
"""Every study by name: one line about it, and the function that runs it."""
