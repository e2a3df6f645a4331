"""Caches of one model side by side at equal peak bytes: perplexity of long documents, retrieval, time per token.

Documents are read in chunks, as a stream is. What counts as peak is what a cache holds after a chunk, in bytes of living
memories; an expiring memory also pays for its span and position. Questions are asked after the context was read: no
method knows them while it forgets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from .cache import ExpiringCache
from .handle import Retrofit
from .rivals import METHODS as RIVALS
from .rivals import EvictingCache, observed

METHODS = ("none", *RIVALS, "expire")
NewCache = Callable[[], Any]


@dataclass(frozen=True)
class Question:
    """A context, and what to answer after it was read."""

    context: Tensor
    """Tokens [n]."""
    question: Tensor
    """Tokens [q], read after the context."""
    answer: Tensor
    """Tokens [a] that must be the likeliest, one after another."""


@contextlib.contextmanager
def method(handle: Retrofit, name: str, tokens: int, dial: float = 1.0) -> Iterator[NewCache]:
    """Inside, the model runs with caches of one method that hold at most the bytes of `tokens` plain memories."""
    if name == "expire":
        handle.dial = dial
        try:
            yield handle.new_cache
        finally:
            handle.dial = 1.0
        return
    with handle.paused() as model:
        if name == "none":
            yield lambda: DynamicCache(config=model.config)
            return
        if any(x.window is not None for x in handle.layers):
            raise ValueError(f"method {name} needs a model without windows of its own, got {type(model).__name__}")
        layers = len(handle.layers)
        with observed(model, [x.module for x in handle.layers], handle.configs):
            yield lambda: EvictingCache(name, tokens, layers)


@torch.no_grad()
def read(model: Any, cache: Any, ids: Tensor, chunk: int) -> tuple[Tensor, int]:
    """Read ids [n]; returns each token's loss but the first's [n - 1], in nats, and the most bytes that were held."""
    losses, peak, last = [], 0, None
    for part in ids.unsqueeze(0).split(chunk, 1):
        logits = model(part, past_key_values=cache, use_cache=True).logits[0].float()
        given = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
        losses.append(F.cross_entropy(given, part[0, len(part[0]) - len(given) :], reduction="none"))
        last, peak = logits[-1:], max(peak, held_bytes(cache))
    return torch.cat(losses), peak


def held_bytes(cache: Any) -> int:
    """Bytes of living memories: keys and values, and for an expiring cache spans and positions."""
    if not isinstance(cache, ExpiringCache):
        tensors = [x for layer in cache.layers if layer.is_initialized for x in (layer.keys, layer.values)]
        return sum(x.numel() * x.element_size() for x in tensors)
    total = 0
    for layer, live in zip(cache.layers, cache.live()):
        memory = layer.memory
        assert memory is not None
        one = sum(x.element_size() * x.shape[-1] for x in (memory.slots["k"], memory.slots["v"])) + 12
        total += int(live.sum()) * one
    return total


def peak_tokens(handle: Retrofit, share: float, context: int) -> tuple[int, int]:
    """A budget as plain memories per head, and in bytes over all layers."""
    tokens = max(int(share * context), 1)
    one = sum(x.kv_heads * 2 * x.head_dim * next(x.module.parameters()).element_size() for x in handle.layers)
    return tokens, tokens * one


def find_dial(handle: Retrofit, documents: list[Tensor], budget: int, chunk: int, rounds: int = 6) -> float:
    """The largest multiplier of spans, up to 1, with which the documents' peak stays within `budget` bytes.

    This turns the memory down at run time. Spans below the trained ones are not what was trained.
    """

    def fits(dial: float) -> bool:
        with method(handle, "expire", 0, dial) as new_cache:
            return max(read(handle.model, new_cache(), ids, chunk)[1] for ids in documents) <= budget

    if fits(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@torch.no_grad()
def answers(model: Any, new_cache: NewCache, question: Question, chunk: int) -> bool:
    """Whether the answer is what greedy decoding would write after context and question."""
    cache = new_cache()
    read(model, cache, question.context, chunk)
    tail = torch.cat([question.question, question.answer])
    logits = model(tail.unsqueeze(0), past_key_values=cache, use_cache=True).logits[0]
    return bool((logits[len(question.question) - 1 : -1].argmax(-1) == question.answer).all())


@torch.no_grad()
def time_per_token(model: Any, cache: Any, token: Tensor, steps: int = 16) -> float:
    """Median seconds of a decoding step on a cache that was filled before."""
    times = []
    for _ in range(steps):
        _synchronise(token.device)
        began = time.perf_counter()
        model(token.reshape(1, 1), past_key_values=cache, use_cache=True)
        _synchronise(token.device)
        times.append(time.perf_counter() - began)
    return float(numpy.median(times))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def evaluate(
    handle: Retrofit,
    documents: list[Tensor],
    questions: list[Question],
    methods: list[str],
    budgets: list[float],
    *,
    chunk: int = 128,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """One row for each method and budget; documents [n] of one length."""
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")
    rows = []
    for name in methods:
        for share in budgets if name != "none" else [1.0]:
            row = _evaluate_one(handle, documents, questions, name, share, chunk)
            rows.append(row)
            if progress is not None:
                progress(row)
    return rows


def _evaluate_one(
    handle: Retrofit, documents: list[Tensor], questions: list[Question], name: str, share: float, chunk: int
) -> dict[str, Any]:
    tokens, budget = peak_tokens(handle, share, len(documents[0]))
    dial = find_dial(handle, documents, budget, chunk) if name == "expire" else 1.0
    device = documents[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with method(handle, name, tokens, dial) as new_cache:
        losses, peak, cache = [], 0, None
        for ids in documents:
            cache = new_cache()
            loss, held = read(handle.model, cache, ids, chunk)
            losses.append(float(loss.mean()))
            peak = max(peak, held)
        seconds = time_per_token(handle.model, cache, documents[-1][-1])
        right = [answers(handle.model, new_cache, question, chunk) for question in questions]
    row: dict[str, Any] = dict(
        method=name, budget=share, losses=losses, perplexity=float(numpy.exp(numpy.mean(losses)))
    )
    row |= dict(peak_bytes=peak, budget_bytes=budget, dial=dial, seconds_per_token=seconds)
    row["accuracy"] = sum(right) / len(right) if right else None
    row["allocator_peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return row


def bootstrap(ours: list[float], theirs: list[float], rounds: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Mean difference of two methods' losses on the same documents, and its 95% interval by resampling documents."""
    difference = numpy.array(ours) - numpy.array(theirs)
    rng = numpy.random.default_rng(seed)
    means = difference[rng.integers(len(difference), size=(rounds, len(difference)))].mean(1)
    low, high = numpy.quantile(means, [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)
