"""Streaming generation from one prompt: tokens or text are yielded as they are drawn, any number of them, in bounded memory.

It is a thin layer over `Stream`: the prompt is read once, and its memory is copied for every sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.sampling import Sampling, narrow
from expire_span.stream import Stream
from expire_span.tasks.contract import Codec

__all__ = [
    "START",
    "Sampling",
    "generate_text",
    "generate_tokens",
    "narrow",
]

START = b"\n"
"""Used in place of an empty prompt, since the model must read one byte before it can predict."""


def generate_tokens(
    model: Any, prompt: Tensor, sampling: Sampling, *, samples: int = 1, max_tokens: int | None = None
) -> Iterator[Tensor]:
    """Yield tokens [samples], one step at a time. The prompt [T] is read once and its memory copied for every sample."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    stream = Stream(model, rows=1)
    stream.read([prompt])
    if samples > 1:
        stream = stream.fork([0] * samples)
    for step in stream.generate(sampling, max_tokens):
        yield step.tokens


def generate_text(
    decoder: Decoder,
    codec: Codec,
    prompt: bytes,
    sampling: Sampling | None = None,
    *,
    max_tokens: int | None = 256,
    samples: int = 1,
) -> Iterator[list[bytes]]:
    """Yield the text that each sample's new token adds, as they come; it may be empty where a character has several tokens."""
    if decoder.config.vocab != codec.size:
        raise ValueError(
            f"the codec must have the model's vocab {decoder.config.vocab}, got one of {codec.size} tokens"
        )
    ids = codec.encode(prompt or START, "the prompt").tolist()
    if not ids:
        raise ValueError(f"the prompt {prompt.decode(errors='replace')!r} has no token; give a prompt of some words")
    writers = [codec.writer(ids) for _ in range(samples)]
    options = {"samples": samples, "max_tokens": max_tokens}
    for step in generate_tokens(decoder, torch.tensor(ids), sampling or Sampling(), **options):
        yield [write(token) for write, token in zip(writers, step.tolist())]
