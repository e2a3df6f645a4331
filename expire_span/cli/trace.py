"""`expire-span trace [RUN]`: writes what a run's model remembers while it reads, as lines of JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from expire_span.checks import Count, Natural
from expire_span.disk.files import check_output, seal_line, write_output
from expire_span.runs import UserError, find_run

from .parsing import PROGRAM, parse, read_text_option
from .runs import OnAnyRun, find_adapter


@dataclass(frozen=True)
class TraceCommand(OnAnyRun):
    """Write the trace of a text, or of the task's own sample: spans, births, deaths, predictions, bytes."""

    text: Path | None = None
    """File to read; None takes the task's sample."""
    out: Path | None = None
    """File to write; None prints the lines as they are made."""
    max_span: float | None = None
    """Clamp every span to this many steps, to see what the model loses."""
    live: float | None = None
    """Shorten all lifetimes by one factor, so that this many memories are alive on average, to see what the model loses."""
    model: str | None = None
    """Of an adapter: its base model, a folder, a .gguf file or a hub name; None is where the adapter was made."""
    tokens: Count | None = None
    """Number of tokens after which to stop; None reads everything."""
    episode: Natural | None = None
    """Of an agent: which of its test episodes; None takes a long one."""


def run_trace(args: list[str]) -> int:
    command = parse(TraceCommand, args, f"{PROGRAM} trace")
    if command.out is not None:
        check_output(command.out)
    adapter = find_adapter(command.run)
    raw = None if command.text is None else read_text_option(command.text)
    from expire_span.view.limit import Cut
    from expire_span.view.source import open_adapter, open_reader
    from expire_span.view.trace import encode

    cut = Cut(command.max_span, command.live)
    reader = open_adapter(adapter, command.model) if adapter else open_reader(find_run(command.run, command.runs_dir))
    if command.episode is not None and not reader.plays:
        raise UserError(f"--episode {command.episode} is for agents, which play episodes; {reader.name} reads a sample")
    if raw is None:
        lines = reader.trace_sample(command.tokens, cut, command.episode)
    else:
        lines = reader.trace_text(raw, cut, command.tokens)
    if command.out is not None:
        write_output(command.out, b"".join(seal_line(encode(line)) for line in lines))
        print(command.out)
        return 0
    for line in lines:
        sys.stdout.buffer.write(seal_line(encode(line)))
        sys.stdout.buffer.flush()
    return 0
