"""The trace format: what a model read or generated, and which memories were written and died at each step, as lines of JSON.

The first line is the header, each further line one step; docs/trace.md documents the fields. Every picture of memory is drawn
from a trace and nothing else. This module reads and writes the format; `tracer.py` makes traces from a decoder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expire_span.disk.files import SEAL, check_line, seal_line
from expire_span.runs import UserError, write_atomic

from .trace_check import find_fault

VERSION = 2
"""Version of the format; a reader refuses every other."""
FOR_GOOD = 1e7
"""Spans from this one on mean that a memory is kept for good, as a retrofitted model keeps its first tokens."""
NEEDED = {
    "header": ("version", "name", "task", "system", "layers", "heads", "ramp", "memory_bytes", "full_bytes"),
    "step": ("i", "text", "live", "bytes"),
}
"""Fields without which a line cannot be read."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """A whole trace in memory. Streams are read line by line instead, with `read_lines`."""

    header: Line
    steps: list[Line]

    @classmethod
    def of(cls, lines: Iterable[Line]) -> Trace:
        header, *steps = lines
        return cls(header, steps)

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def has_spans(self) -> bool:
        return bool(self.steps) and self.steps[0].get("spans") is not None

    @property
    def spans(self) -> np.ndarray:
        """[layers, heads, T], in steps; a system without spans is refused."""
        if not self.steps:
            raise ValueError("the trace has a header but no steps, so there are no spans")
        if not self.has_spans:
            raise ValueError(f"the memory system {self.header['system']} gives tokens no spans")
        return np.array([step["spans"] for step in self.steps], np.float64).transpose(1, 2, 0)

    @property
    def dies(self) -> np.ndarray:
        """The step at which each memory is dead unless a cap evicts it before, [layers, heads, T]."""
        return np.array([step["dies"] for step in self.steps]).transpose(1, 2, 0)

    @property
    def bounded_spans(self) -> np.ndarray:
        """The spans, where those of memories kept for good are the longest of the others in their layer."""
        spans = self.spans
        longest = np.where(spans < FOR_GOOD, spans, 0).max((1, 2), keepdims=True)
        return np.where(spans < FOR_GOOD, spans, longest)

    @property
    def bits(self) -> np.ndarray:
        """Negative log2 probability of each token, [T]; NaN for the first one and where the task does not predict tokens."""
        return np.array([math.nan if step.get("bits") is None else step["bits"] for step in self.steps])

    def lines(self) -> Iterator[Line]:
        yield self.header
        yield from self.steps

    def save(self, path: Path) -> None:
        write_atomic(Path(path), b"".join(seal_line(encode(line)) for line in self.lines()))

    @classmethod
    def load(cls, path: Path) -> Trace:
        return cls.of(read_lines(path))


def encode(line: Line) -> bytes:
    """One line of the file, without its checksum. NaN and infinities, which JSON does not have, raise an error."""
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace") + b"\n"


def read_lines(path: Path) -> Iterator[Line]:
    """The header, then the steps. UserError if the file is not a trace of this version."""
    try:
        with open(path, "rb") as file:
            yield from check_lines(file, str(path))
    except OSError as error:
        raise UserError(f"cannot read the trace {path}: {error.strerror or error}") from error


def check_lines(lines: Iterable[bytes], where: str) -> Iterator[Line]:
    number, header = -1, {}
    for number, raw in enumerate(lines):
        kind = "step" if number else "header"
        line = _decode(raw, where, number + 1)
        if SEAL in line:  # other programs may write traces without checksums
            line = check_line(line, raw, f"line {number + 1} of the trace {where}")
        if not number and line.get("version") != VERSION and "version" in line:
            got = line["version"]
            raise UserError(
                f"the trace {where} has version {got!r}, this version of expire-span reads version {VERSION}; "
                "write it again with: expire-span trace RUN --text FILE"
            )
        missing = [name for name in NEEDED[kind] if name not in line]
        if missing or line.get("kind") != kind:
            raise UserError(
                f"{where} is not a trace: line {number + 1} should be a {kind} with {', '.join(NEEDED[kind])}"
            )
        header = header or line
        if fault := find_fault(line, number, header):
            raise UserError(
                f"the trace {where} is damaged at line {number + 1}: {fault}; write it again with: expire-span trace RUN"
            )
        yield line
    if number < 0:
        raise UserError(f"{where} is not a trace: it is empty, and a trace begins with a header line")


def _decode(raw: bytes, where: str, number: int) -> Line:
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a trace: line {number} is not JSON ({error})") from error
    return line if isinstance(line, dict) else {}
