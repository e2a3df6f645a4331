"""Streaming generation from one prompt: tokens or bytes are yielded as they are drawn, any number of them, in bounded memory.

It is a thin layer over `Stream`: the prompt is read once, and its memory is copied for every sample.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.sampling import Sampling, narrow
from expire_span.stream import Stream
from expire_span.stream.prompts import PROMPT_BLOCK, read_prompt
from expire_span.tasks.tokens import Tokenizer

__all__ = [
    "PROMPT_BLOCK",
    "START",
    "Sampling",
    "generate_bytes",
    "generate_text",
    "generate_tokens",
    "narrow",
    "read_prompt",
]

START = b"\n"
"""Used in place of an empty prompt, since the model must read one byte before it can predict."""


def generate_tokens(
    decoder: Decoder, prompt: Tensor, sampling: Sampling, *, samples: int = 1, max_tokens: int | None = None
) -> Iterator[Tensor]:
    """Yield tokens [samples], one step at a time. The prompt [T] is read once and its memory copied for every sample."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    stream = Stream(decoder, rows=1)
    stream.read([prompt])
    if samples > 1:
        stream = stream.fork([0] * samples)
    for step in stream.generate(sampling, max_tokens):
        yield step.tokens


def generate_bytes(
    decoder: Decoder, prompt: bytes, sampling: Sampling | None = None, *, max_tokens: int | None = 256, samples: int = 1
) -> Iterator[list[bytes]]:
    """Yield one new byte for each sample, as they come. Only models of bytes (256 token kinds) can do this."""
    if decoder.config.vocab != 256:
        raise ValueError(f"generating text needs a model of bytes with vocab 256, got vocab {decoder.config.vocab}")
    tokens = torch.frombuffer(bytearray(prompt or START), dtype=torch.uint8)
    for step in generate_tokens(decoder, tokens, sampling or Sampling(), samples=samples, max_tokens=max_tokens):
        yield [bytes([token]) for token in step.tolist()]


def generate_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: bytes,
    sampling: Sampling | None = None,
    *,
    max_tokens: int | None = 256,
    samples: int = 1,
) -> Iterator[list[bytes]]:
    """The same for a model with a tokenizer: yields the text that each sample's new token adds, which may be empty."""
    ids = tokenizer.encode(prompt or START, "the prompt")[0].tolist()
    if not ids:
        raise ValueError(f"the prompt {prompt.decode(errors='replace')!r} has no token; give a prompt of some words")
    writers = [tokenizer.writer(ids) for _ in range(samples)]
    options = {"samples": samples, "max_tokens": max_tokens}
    for step in generate_tokens(decoder, torch.tensor(ids), sampling or Sampling(), **options):
        yield [writer.write(token).encode() for writer, token in zip(writers, step.tolist())]
