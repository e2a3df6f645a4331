"""Endless streams through a retrofitted model in flat memory: read, write, fork; positions are re-based on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cache import ExpiringCache
from .handle import Retrofit
from .layouts import ROTARY, text_config

CHUNK = 256
"""Tokens per forward pass while reading."""
REBASE_AFTER = 2**15
"""Tokens between two re-basings: float32 rotary angles of transformers err by 0.03 in a score at position 1e6."""


@dataclass(frozen=True)
class Drawing:
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

    def draw(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """logits [B, V] -> tokens [B]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1]), -1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None:
            ordered, order = logits.sort(-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            logits = logits.masked_fill((before >= self.top_p).gather(-1, order.argsort(-1)), -torch.inf)
        return torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)[:, 0].to(logits.device)


class Stream:
    """One or more rows of tokens that go on for ever; what is held stays bounded."""

    def __init__(self, handle: Retrofit, *, rebase_after: int = REBASE_AFTER) -> None:
        self.handle, self.model = handle, handle.model
        self.cache: ExpiringCache = handle.new_cache()
        self.logits: Tensor | None = None
        """Of the token to come, [B, V]."""
        self.read_tokens = 0
        self._rebase_after = rebase_after
        rotary = text_config(handle.model).model_type in ROTARY
        self._can_rebase = rotary and all(x.inverse_frequencies is not None for x in self.cache.layers)

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, T]; returns logits of the token to come, [B, V]."""
        device = next(self.model.parameters()).device
        for chunk in tokens.to(device).split(CHUNK, dim=1):
            self._rebase()
            out = self.model(chunk, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.logits = out.logits[:, -1]
            self.read_tokens += chunk.shape[1]
        if self.logits is None:
            raise ValueError("a stream must read at least one token before it can go on, got none")
        return self.logits

    def write(self, count: int | None = None, drawing: Drawing | None = None) -> Iterator[Tensor]:
        """Draw tokens [B] one after another and read each; with no count for ever."""
        drawing = drawing or Drawing()
        generator = torch.Generator().manual_seed(drawing.seed)
        made = 0
        while count is None or made < count:
            if self.logits is None:
                raise ValueError("a stream must read at least one token before it can write, got none")
            token = drawing.draw(self.logits, generator)
            yield token
            self.read(token.unsqueeze(1))
            made += 1

    def fork(self, copies: int = 1) -> Stream:
        """An independent stream that goes on from here, each row `copies` times."""
        twin = object.__new__(Stream)
        twin.__dict__.update(self.__dict__, cache=self.cache.fork(copies))
        twin.logits = None if self.logits is None else self.logits.repeat_interleave(copies, 0)
        return twin

    def _rebase(self) -> None:
        """Keep positions small: no memory is older than the longest life, so all before that can be forgotten."""
        if self._can_rebase and self.cache.seen >= self._rebase_after + self.handle.longest_life:
            self.cache.rebase(self.cache.seen - self.handle.longest_life)


def stream(handle: Retrofit, tokens: Tensor, count: int | None = None, **drawing: float) -> Iterator[Tensor]:
    """Read a prompt [B, T] and yield tokens [B], for ever without a count; see `Drawing` for the options."""
    reader = Stream(handle)
    reader.read(tokens)
    yield from reader.write(count, Drawing(**drawing))  # type: ignore[arg-type]
