"""Draws cases of all faces in turn, checks them, shrinks those that fail and counts."""

from __future__ import annotations

import json
import random
import re
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .known import known_fault

Case = dict[str, Any]
SHRINK_SECONDS = 20.0
"""Time for making a failing case smaller."""


class Face(Protocol):
    """What the module of a face has."""

    NAME: str
    SIMPLE: Case

    def draw(self, rng: random.Random) -> Case: ...
    def check(self, case: Case) -> None: ...


@dataclass
class Finding:
    """A failing case, as small as it became, and what it said."""

    face: str
    case: Case
    message: str
    seconds: float
    """Processor time that the face had run until it was found."""
    known: str | None
    times: int = 1

    @property
    def command(self) -> str:
        return f"python -m tests.fuzz --case {shlex.quote(json.dumps({'face': self.face, **self.case}))}"

    def __str__(self) -> str:
        label = f"known: {self.known}" if self.known else "NEW"
        return f"[{label}] {self.face}, after {self.seconds:.1f} s: {self.message}\n    {self.command}"


@dataclass
class Tally:
    """What was run of one face."""

    cases: int = 0
    seconds: float = 0.0
    """Processor time, so that rates do not depend on what else the machine does."""
    slowest: float = 0.0
    found: dict[str, Finding] = field(default_factory=dict)

    def join(self, other: Tally) -> None:
        self.cases, self.seconds = self.cases + other.cases, self.seconds + other.seconds
        self.slowest = max(self.slowest, other.slowest)
        for key, finding in other.found.items():
            if key in self.found:
                self.found[key].times += finding.times
            else:
                self.found[key] = finding

    def __str__(self) -> str:
        rate = self.cases / max(self.seconds, 1e-9)
        findings = sum(f.times for f in self.found.values())
        return f"{self.cases} cases, {rate:.1f}/s, slowest {self.slowest:.1f} s, {findings} failed"


def fuzz(
    faces: Sequence[Face], seconds: float, seed: str, say: Callable[[str], Any] = print, stop_at_first: bool = False
) -> dict[str, Tally]:
    """Give each face the same time, until `seconds` are over. A face's cases depend on the seed alone."""
    end, tallies = time.monotonic() + seconds, {face.NAME: Tally() for face in faces}
    while time.monotonic() < end:
        face = min(faces, key=lambda f: tallies[f.NAME].seconds)
        tally = tallies[face.NAME]
        case = _plain(face.draw(random.Random(f"{seed}/{face.NAME}/{tally.cases}")))
        begin = time.process_time()
        message = failure(face, case)
        took = time.process_time() - begin
        tally.cases, tally.seconds, tally.slowest = tally.cases + 1, tally.seconds + took, max(tally.slowest, took)
        if message is not None:
            _note(face, tally, case, message, say)
            if stop_at_first and any(x.known is None for x in tally.found.values()):
                break
    return tallies


def failure(face: Face, case: Case) -> str | None:
    """What is wrong with a case; None if nothing is."""
    try:
        face.check(case)
    except Exception as error:
        first, *_ = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {first[:300]}"
    return None


def kind(message: str) -> str:
    """Failures that differ in numbers and paths only are of one kind."""
    message = re.sub(r"/\S+", "PATH", message)
    return re.sub(r"[-+0-9.einaf]*\d[-+0-9.einaf]*", "#", message)[:80]


def shrink(face: Face, case: Case, message: str, seconds: float = SHRINK_SECONDS) -> tuple[Case, str]:
    """Make options simpler one by one, as long as the case goes on failing in the same way."""
    end, again = time.monotonic() + seconds, True
    while again:
        again = False
        for name in case:
            for value in _simpler(case[name], face.SIMPLE.get(name)):
                if time.monotonic() > end:
                    return case, message
                smaller = case | {name: value}
                found = failure(face, smaller)
                if found is not None and kind(found) == kind(message):
                    case, message, again = smaller, found, True
                    break
    return case, message


def _simpler(value: Any, simplest: Any) -> list[Any]:
    """Values to try instead, the simplest first."""
    if isinstance(value, list):
        return [value[:0], value[: len(value) // 2], value[len(value) // 2 :], value[1:], value[:-1]] if value else []
    if simplest is None or value == simplest:
        return []
    if type(value) is int and type(simplest) is int and value > simplest:
        steps = (simplest, (value + simplest) // 2, value - 1)
        return [x for n, x in enumerate(steps) if x != value and x not in steps[:n]]
    return [simplest]


def _note(face: Face, tally: Tally, case: Case, message: str, say: Callable[[str], Any]) -> None:
    known = known_fault(face.NAME, case, message)
    key = known or kind(message)
    if key in tally.found:
        tally.found[key].times += 1
        return
    small, words = (case, message) if known else shrink(face, case, message)
    tally.found[key] = Finding(face.NAME, small, words, tally.seconds, known)
    say(str(tally.found[key]))


def _plain(case: Case) -> Case:
    """The case as it will be read again from the command line."""
    return json.loads(json.dumps(case))
