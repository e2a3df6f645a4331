"""`expire-span generate`: prints generated text token by token."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from expire_span.checks import Natural, Seed, Temperature, between
from expire_span.runs import RunFolder, UserError, find_run

from .parsing import PROGRAM, parse, warn
from .runs import OnAnyRun

if TYPE_CHECKING:
    from torch import Tensor

    from expire_span.serve.text import TextModel

MOST_SAMPLES = 100_000
"""Largest number of continuations that are generated side by side."""


@dataclass(frozen=True)
class Generate(OnAnyRun):
    """Write text token by token, in bounded memory, with a run's newest checkpoint, or with a retrofitted model. Ctrl-C ends
    an endless one."""

    adapter: Path | None = None
    """Adapter folder of a retrofitted model; RUN is then its folder, .gguf file or hub name."""
    prompt: str = ""
    """Text to go on from; - reads it from standard input."""
    file: Path | None = None
    """File to go on from, of any length, in place of --prompt."""
    max_tokens: Natural | None = 256
    """How many tokens to write (bytes, characters or words, as the run reads them); None never stops."""
    samples: Annotated[int, between(1, MOST_SAMPLES)] = 1
    """How many continuations to write; with more than one they are printed one after another at the end."""
    temperature: Temperature = 1.0
    """Below 1 sharpens the distribution; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of tokens that holds this much of the probability."""
    seed: Seed = 0
    """Seed of the draws."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


def run_generate(args: list[str]) -> int:
    command = parse(Generate, args, f"{PROGRAM} generate")
    run = find_run(command.run, command.runs_dir) if command.adapter is None else None
    _check(command)
    prompt = _read_prompt(command)
    steps = _continue(command, prompt) if run is None else _generate(command, run, prompt)
    if command.samples > 1:
        for text in zip(*steps):
            _write(prompt + b"".join(text) + b"\n\n")
        return 0
    if command.file is None:  # a whole file is not printed before its continuation
        _write(prompt)
    with contextlib.suppress(KeyboardInterrupt) if command.max_tokens is None else contextlib.nullcontext():
        for (byte,) in steps:
            _write(byte)
    _write(b"\n")
    return 0


def _check(command: Generate) -> None:
    if command.samples > 1 and command.max_tokens is None:
        raise UserError(f"several samples need --max-tokens, got samples {command.samples} and max-tokens None")


def _generate(command: Generate, run: RunFolder, prompt: bytes) -> Iterator[list[bytes]]:
    """New bytes of all samples, step by step, from the run's newest checkpoint."""
    from expire_span.checkpoint import load_model
    from expire_span.generate import Sampling, generate_text
    from expire_span.tasks.registry import text_codec
    from expire_span.train.devices import check_device

    run.check_can("generate")
    sampling = Sampling(command.temperature, command.top_k, command.top_p, command.seed)
    codec = text_codec(run.config.task, "generate")
    decoder, _ = load_model(run, check_device(command.device), warn)
    return generate_text(decoder, codec, prompt, sampling, max_tokens=command.max_tokens, samples=command.samples)


def _continue(command: Generate, prompt: bytes) -> Iterator[list[bytes]]:
    """New text of all samples, step by step, from a retrofitted model, which is opened before anything is printed."""
    import torch

    from expire_span.generate import Sampling, generate_tokens
    from expire_span.serve.text import open_retrofit

    if command.run is None or command.adapter is None:
        raise UserError(
            f"--adapter {command.adapter} needs its model, got none; give a folder, a .gguf file or a hub name"
        )
    sampling = Sampling(command.temperature, command.top_k, command.top_p, command.seed)
    text = open_retrofit(command.run, command.adapter, "fp32", command.device)
    ids = text.encode(prompt.decode(errors="replace"))
    if not ids:
        raise UserError("the prompt has no token; give --prompt some words")
    options = {"samples": command.samples, "max_tokens": command.max_tokens}
    return _as_text(generate_tokens(text.model, torch.tensor(ids), sampling, **options), text, ids, command.samples)


def _as_text(steps: Iterable[Tensor], text: TextModel, ids: list[int], samples: int) -> Iterator[list[bytes]]:
    """The bytes of each step's tokens; it ends where each sample has an end token."""
    from expire_span.serve.detokenizer import TextWriter

    writers: list[TextWriter | None] = [TextWriter(text.tokenizer, (), ids) for _ in range(samples)]
    for step in steps:
        writers = [None if token in text.ends else writer for writer, token in zip(writers, step.tolist())]
        if not any(writers):
            return
        yield [writer.add(token).encode() if writer else b"" for writer, token in zip(writers, step.tolist())]


def _read_prompt(command: Generate) -> bytes:
    if command.file is not None and command.prompt:
        raise UserError(f"give --prompt or --file, got both: {command.prompt!r} and {command.file}")
    if command.file is not None:
        return command.file.read_bytes()
    return sys.stdin.buffer.read() if command.prompt == "-" else command.prompt.encode()


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
