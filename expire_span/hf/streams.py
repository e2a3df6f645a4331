"""Endless streams through a retrofitted model in bounded memory: read, write, fork; positions are renumbered on the way."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from expire_span.checks import check_count
from expire_span.sampling import Sampling, draw

from .cache import ExpiringCache
from .decoding import REBASE_AFTER, RetrofitEngine, can_decode
from .handle import Retrofit

CHUNK = 256
"""Tokens per forward pass while reading."""


class Stream:
    """One or more rows of tokens of any length, in bounded memory.

    Prompts are read into an `ExpiringCache`. Tokens are generated over slots of fixed size where the model allows it, so that
    on a GPU a step is one replay of a recorded graph. Memories are moved from the one to the other as needed.
    """

    def __init__(self, handle: Retrofit, *, rebase_after: int = REBASE_AFTER, slots: bool | None = None) -> None:
        """slots: whether to generate over slots; None does so on a GPU, where it is faster."""
        check_count("rebase_after", rebase_after)
        self.handle, self.model = handle, handle.model
        self.logits: Tensor | None = None
        """Logits of the next token, [B, V]; None before anything was read."""
        self.read_tokens = 0
        self._cache: ExpiringCache | None = handle.new_cache()
        self._engine: RetrofitEngine | None = None
        self._generator: tuple[int, torch.Generator] | None = None
        self._rebase_after = rebase_after
        self._can_rebase = can_decode(handle)
        self._slots = self._can_rebase and (slots if slots is not None else self.device.type == "cuda")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def has_first_tokens(self) -> bool:
        """Whether the first tokens, which are kept for ever, have been read: a step over slots cannot mark them."""
        return self.read_tokens >= self.handle.config.keep_first

    @property
    def cache(self) -> ExpiringCache:
        """The stream's memories as an `ExpiringCache`. If they are in slots, this moves them back into a cache."""
        if self._cache is None:
            assert self._engine is not None
            self._cache, self._engine = self._engine.to_cache(), None
        return self._cache

    @torch.no_grad()
    def read(self, tokens: Tensor) -> Tensor:
        """Read tokens [B, T]; returns the logits of the next token, [B, V]."""
        for chunk in tokens.to(self.device).split(CHUNK, dim=1):
            self._rebase()
            out = self.model(chunk, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
            self.logits = out.logits[:, -1]
            self.read_tokens += chunk.shape[1]
        if self.logits is None:
            raise ValueError("a stream must read at least one token before it can go on, got none")
        return self.logits

    def write(self, count: int | None = None, sampling: Sampling | None = None) -> Iterator[Tensor]:
        """Yield `count` sampled tokens [B], each of which is read before the next; without end if count is None.

        A second call with the same seed goes on with the random draws, so that two answers of one stream differ.
        """
        if count is not None:
            check_count("count", count, least=0)
        sampling = sampling or Sampling()
        generator = self._generator_of(sampling)
        made = 0
        while count is None or made < count:
            if self.logits is None:
                raise ValueError("a stream must read at least one token before it can write, got none")
            token = draw(self.logits.float(), sampling, generator)
            yield token
            self._step(token)
            made += 1

    def _generator_of(self, sampling: Sampling) -> torch.Generator:
        """The random generator of a seed; the same one is used until another seed is given."""
        if self._generator is None or self._generator[0] != sampling.seed:
            self._generator = sampling.seed, torch.Generator(self.device).manual_seed(sampling.seed)
        return self._generator[1]

    def _step(self, token: Tensor) -> None:
        if not (self._slots and self.has_first_tokens):
            self.read(token.unsqueeze(1))
            return
        assert self.logits is not None
        if self._engine is None:
            self._engine = RetrofitEngine(self.handle, len(token), rebase_after=self._rebase_after)
            self._engine.begin(self.cache, self.logits)
            self._cache = None
        self._engine.tokens.copy_(token)
        self._engine.advance(None)
        self.logits = self._engine.logits.clone()
        self.read_tokens += 1

    def fork(self, copies: int = 1) -> Stream:
        """An independent stream that goes on from here, each row `copies` times."""
        check_count("copies", copies)
        twin = object.__new__(Stream)
        twin.__dict__.update(self.__dict__, _cache=self.cache.fork(copies))
        twin.logits = None if self.logits is None else self.logits.repeat_interleave(copies, 0)
        if self._generator is not None:
            seed, generator = self._generator
            twin._generator = seed, torch.Generator(self.device).set_state(generator.get_state())
        return twin

    def _rebase(self) -> None:
        """Renumber positions so that they stay small: the oldest living memory is at most `longest_life` tokens old."""
        if self._can_rebase and self.cache.seen >= self._rebase_after + self.handle.longest_life:
            self.cache.rebase(self.cache.seen - self.handle.longest_life)


def stream(handle: Retrofit, tokens: Tensor, count: int | None = None, **sampling: float) -> Iterator[Tensor]:
    """Read a prompt [B, T] and yield tokens [B], without end if count is None; see `Sampling` for the options."""
    reader = Stream(handle)
    reader.read(tokens)
    yield from reader.write(count, Sampling(**sampling))  # type: ignore[arg-type]
