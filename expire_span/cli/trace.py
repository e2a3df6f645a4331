"""`expire-span trace [RUN]`: what a run's model remembers while it reads, as lines of JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from expire_span.runs import UserError, find_run, write_atomic

from .parsing import PROGRAM, parse
from .runs import OnAnyRun


@dataclass(frozen=True)
class TraceCommand(OnAnyRun):
    """Write the trace of a text, or of the task's own sample: spans, births, deaths, predictions, bytes."""

    text: Path | None = None
    """File to read; None takes the task's sample."""
    out: Path | None = None
    """File to write; None prints the lines as they come."""
    max_span: float | None = None
    """Cut every span to so many steps, to see what the model loses."""
    tokens: int | None = None
    """Stop after so many tokens."""


def run_trace(args: list[str]) -> int:
    command = parse(TraceCommand, args, f"{PROGRAM} trace")
    run = find_run(command.run, command.runs_dir)
    if command.tokens is not None and command.tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {command.tokens}")
    raw = None if command.text is None else _read(command.text)
    from expire_span.view.source import open_reader
    from expire_span.view.trace import encode

    reader = open_reader(run)
    if raw is None:
        lines = reader.trace_sample(command.tokens, command.max_span)
    else:
        lines = reader.trace_text(raw[: command.tokens], command.max_span)
    if command.out is not None:
        write_atomic(command.out, b"".join(encode(line) for line in lines))
        print(command.out)
        return 0
    for line in lines:
        sys.stdout.buffer.write(encode(line))
        sys.stdout.buffer.flush()
    return 0


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --text {path}: {error.strerror}") from error
