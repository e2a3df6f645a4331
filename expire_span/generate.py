"""Streaming decode: bytes come as they are drawn, for ever if wished, in bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.models.state import select_rows

PROMPT_BLOCK = 1024
"""Tokens of a prompt that are read at once."""
START = b"\n"
"""What an empty prompt stands for: the model needs one byte to begin with."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 1.0
    """Below 1 sharpens the distribution; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the smallest set of tokens that holds this share of the probability."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def narrow(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [B, V] of the next token after temperature, top_k and top_p."""
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits.dtype)
    ordered, order = (logits / sampling.temperature).sort(-1, descending=True)
    share = ordered.softmax(-1)
    if sampling.top_k is not None:
        share[..., sampling.top_k :] = 0
    if sampling.top_p is not None:
        share[(share.cumsum(-1) - share) / share.sum(-1, keepdim=True) >= sampling.top_p] = 0
    share = torch.zeros_like(share).scatter(-1, order, share)
    return share / share.sum(-1, keepdim=True)


@torch.inference_mode()
def read_prompt(decoder: Decoder, prompt: Tensor) -> tuple[Tensor, Any]:
    """Feed tokens [B, T]; returns the logits after the last one [B, V] and the state."""
    state, logits = None, None
    for block in prompt.split(PROMPT_BLOCK, dim=1):
        logits, state, _ = decoder(block, state)
    assert logits is not None
    return logits[:, -1].float(), state


def generate_tokens(
    decoder: Decoder, prompt: Tensor, sampling: Sampling, *, samples: int = 1, max_tokens: int | None = None
) -> Iterator[Tensor]:
    """Yield tokens [samples], one step at a time. The prompt [T] is read once and its memory shared out to all samples."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    decoder.eval()
    device = decoder.embed.weight.device
    logits, state = read_prompt(decoder, prompt.to(device).unsqueeze(0))
    everyone = torch.zeros(samples, dtype=torch.long, device=device)
    logits, state = logits.expand(samples, -1), select_rows(state, everyone)
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in itertools.count() if max_tokens is None else range(max_tokens):
        chances = narrow(logits.cpu(), sampling)
        tokens = torch.multinomial(chances, 1, generator=generator)  # [samples, 1]
        yield tokens[:, 0]
        with torch.inference_mode():
            step, state, _ = decoder(tokens.to(device), state)
            logits = step[:, -1].float()


def generate_bytes(
    decoder: Decoder, prompt: bytes, sampling: Sampling | None = None, *, max_tokens: int | None = 256, samples: int = 1
) -> Iterator[list[bytes]]:
    """Yield one new byte for each sample, as they come. Only models of bytes (256 token kinds) can do this."""
    if decoder.config.vocab != 256:
        raise ValueError(f"generating text needs a model of bytes with vocab 256, got vocab {decoder.config.vocab}")
    tokens = torch.tensor(list(prompt or START), dtype=torch.long)
    for step in generate_tokens(decoder, tokens, sampling or Sampling(), samples=samples, max_tokens=max_tokens):
        yield [bytes([token]) for token in step.tolist()]
