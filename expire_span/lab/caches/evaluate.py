"""Comparison of caches of one model at equal peak bytes: perplexity of long documents, retrieval, time per token.

Documents are read in chunks, as a stream is. The peak is the largest number of bytes of living memories that a cache holds
after a chunk; for an expiring memory, its span and position are counted as well. Questions are asked after the context was
read, so that no method knows them when it deletes memories.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from expire_span.hf.adapter import use_budget
from expire_span.hf.cache import ExpiringCache
from expire_span.hf.retrofitted import Retrofit

from .rivals import LEAST_CAPACITY, EvictingCache, evicting
from .rivals import METHODS as RIVALS

METHODS = ("none", *RIVALS, "expire")
MOST_DIAL = 8.0
"""Largest dial, the factor by which predicted spans are multiplied so that the peak meets a budget."""
LEAST_DIAL = 1e-4
"""Smaller dials are not tried."""
CLOSE = 0.97
"""The search for a dial ends once the peak is at least this share of the budget."""
NewCache = Callable[[], Any]


@dataclass(frozen=True)
class Question:
    """A context, a question that is asked after it was read, and the right answer."""

    context: Tensor
    """Tokens [n]."""
    question: Tensor
    """Tokens [q], read after the context."""
    answer: Tensor
    """Tokens [a]; the answer counts as given if greedy decoding would produce them."""
    kind: str = ""
    """Kind of question, such as passkey; accuracy is reported for each kind."""


@contextlib.contextmanager
def method(retrofitted: Retrofit, name: str, tokens: int, dial: float = 1.0) -> Iterator[NewCache]:
    """A context in which the model runs with one method's caches; yields a function that makes one.

    tokens: the budget of a cache, as a number of plain key/value memories per head; dial: factor of predicted spans.
    """
    if name == "expire":
        retrofitted.dial = dial
        try:
            yield retrofitted.new_cache
        finally:
            retrofitted.dial = 1.0
        return
    with retrofitted.paused() as model:
        if name == "none":
            yield lambda: DynamicCache(config=model.config)
            return
        if any(x.window is not None for x in retrofitted.layers):
            raise ValueError(f"method {name} needs a model without windows of its own, got {type(model).__name__}")
        layers = len(retrofitted.layers)
        with evicting([x.module for x in retrofitted.layers], retrofitted.configs):
            yield lambda: EvictingCache(name, tokens, layers)


@torch.no_grad()
def read(model: Any, cache: Any, ids: Tensor, chunk: int, *, scored: bool = True) -> tuple[Tensor, Tensor]:
    """Read documents ids [B, n]; returns the loss of every token but the first [B, n - 1], in nats, and each row's peak bytes
    [B].

    scored: if False, no logits are computed and there are no losses.
    """
    losses, peak, last = [], None, None
    for part in ids.split(chunk, 1):
        keep = 0 if scored else 1
        logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=keep).logits
        if scored:
            given = logits[:, :-1] if last is None else torch.cat([last, logits[:, :-1]], 1)
            wanted = part[:, part.shape[1] - given.shape[1] :]
            losses.append(F.cross_entropy(given.float().mT, wanted, reduction="none"))
            last = logits[:, -1:]
        held = held_bytes(cache)
        peak = held if peak is None else torch.maximum(peak, held)
    assert peak is not None, "a document has at least one token"
    return torch.cat(losses, 1) if losses else ids.new_zeros(len(ids), 0, dtype=torch.float), peak


def held_bytes(cache: Any) -> Tensor:
    """Bytes of each row's living memories [B]: keys and values, and for an expiring cache spans and positions."""
    total: Any = 0
    if not isinstance(cache, ExpiringCache):
        for layer in cache.layers:
            if layer.is_initialized:
                one = sum(x[0].numel() * x.element_size() for x in (layer.keys, layer.values))
                total = total + torch.full((len(layer.keys),), one, device=layer.keys.device)
        return total
    for layer, live in zip(cache.expiring, cache.live()):
        memory = layer.memory
        assert memory is not None
        one = sum(x.element_size() * x.shape[-1] for x in (memory.slots["k"], memory.slots["v"])) + 12
        total = total + live.sum(-1) * one
    return total


def peak_tokens(retrofitted: Retrofit, share: float, context: int) -> tuple[int, int]:
    """A budget, given as a share of the context, as plain memories per head and as bytes over all layers."""
    tokens = max(int(share * context), 1)
    one = sum(x.kv_heads * 2 * x.head_dim * retrofitted.model.dtype.itemsize for x in retrofitted.layers)
    return tokens, tokens * one


def find_dial(
    retrofitted: Retrofit, documents: list[Tensor], budget: int, chunk: int, *, kept: bool = False, rounds: int = 8
) -> float:
    """The largest dial, up to MOST_DIAL, with which no document's peak exceeds `budget` bytes; documents [B, n].

    kept: what is left at the end, the mean over all documents, shall not exceed it. Spans other than the predicted ones are not
    what was trained. The search stops within 3% of the budget, or `rounds` tries after the first dial that meets it: where most
    spans are far longer than the documents, a dial must be small before it changes anything. A result of 0 means that spans of
    almost 0 exceed the budget.
    """
    low, high, dial = 0.0, math.inf, 1.0
    while rounds and dial > LEAST_DIAL:
        needed = count_bytes(retrofitted, documents, chunk, dial, kept=kept)
        low, high = (dial, high) if needed <= budget else (low, dial)
        rounds -= low > 0
        if dial == low and (dial == MOST_DIAL or needed >= CLOSE * budget):
            break
        guess = min(dial * CLOSE**0.5 * budget / max(needed, 1), MOST_DIAL, dial / 2 if low == 0 else math.inf)
        dial = guess if low < guess < high else (low + min(high, MOST_DIAL)) / 2
    return low


def count_bytes(retrofitted: Retrofit, documents: list[Tensor], chunk: int, dial: float, *, kept: bool) -> float:
    """Bytes that documents [B, n] need: the largest peak, or the mean of what is kept at the end."""
    found = []
    with method(retrofitted, "expire", 0, dial) as new_cache:
        for ids in documents:
            cache = new_cache()
            peak = read(retrofitted.model, cache, ids, chunk, scored=False)[1]
            found.append(held_bytes(cache) if kept else peak)
    every = torch.cat(found).double()
    return float(every.mean() if kept else every.max())


@torch.no_grad()
def find_right_answers(model: Any, cache: Any, questions: list[Question], chunk: int) -> list[bool]:
    """Whether greedy decoding would give each answer after its context and question; all contexts have the same length."""
    read(model, cache, torch.stack([q.context for q in questions]), chunk, scored=False)
    tails = [torch.cat([q.question, q.answer]) for q in questions]
    padded = torch.nn.utils.rnn.pad_sequence(
        tails, batch_first=True
    )  # attention is causal: answers do not see the padding
    best = model(padded, past_key_values=cache, use_cache=True).logits.argmax(-1)
    right = []
    for row, q in zip(best, questions):
        first = len(q.question) - 1
        right.append(bool((row[first : first + len(q.answer)] == q.answer).all()))
    return right


@torch.no_grad()
def time_per_token(model: Any, cache: Any, token: Tensor, steps: int = 16) -> float:
    """Median seconds of a decoding step divided by its rows, on a cache that has been filled; token [B, 1]."""
    times = []
    for _ in range(steps):
        _synchronise(token.device)
        began = time.perf_counter()
        model(token, past_key_values=cache, use_cache=True)
        _synchronise(token.device)
        times.append(time.perf_counter() - began)
    return float(numpy.median(times)) / len(token)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def evaluate(
    retrofitted: Retrofit,
    documents: list[Tensor],
    questions: list[Question],
    methods: list[str],
    budgets: list[float],
    *,
    chunk: int = 128,
    rows: int = 16,
    progress: Callable[[dict[str, Any]], None] | None = None,
    note: Callable[[str], None] = lambda told: None,
    adapter: Path | None = None,
) -> list[dict[str, Any]]:
    """Results for each method and budget, one dictionary each; documents [n] of equal length are read `rows` at a time.

    progress: called with each result as it is finished; note: called with what is measured next. adapter: its folder, whose
    further budgets are used where they are asked for.
    """
    check_methods(methods)
    check_budgets(retrofitted, methods, budgets, len(documents[0]))
    lines = []
    batches = [torch.stack(documents[n : n + rows]) for n in range(0, len(documents), rows)]
    asked = _in_batches(questions, rows)
    for name in methods:
        for share in budgets if name != "none" else [1.0]:
            note(f"measuring {name} at a budget of {share:g}")
            if name == "expire":
                use_budget(retrofitted, adapter, share)
            line = _evaluate_one(retrofitted, batches, asked, name, share, chunk)
            lines.append(line)
            if progress is not None:
                progress(line)
    return lines


def check_methods(methods: Sequence[str]) -> None:
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        raise ValueError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")


def check_budgets(retrofitted: Retrofit, methods: Sequence[str], budgets: Sequence[float], context: int) -> None:
    """Refuse budgets that a method cannot meet, before anything is computed."""
    ramp, first = retrofitted.config.ramp, retrofitted.config.keep_first
    least = {"none": 0, "expire": ramp + first, **dict.fromkeys(RIVALS, LEAST_CAPACITY)}
    for share in budgets:
        tokens = peak_tokens(retrofitted, share, context)[0]
        for name in methods:
            why = f" (a ramp of {ramp} and {first} tokens that are kept)" if name == "expire" else ""
            if tokens < least[name]:
                raise ValueError(
                    f"a budget of {share:g} leaves {tokens} memories of a context of {context} tokens, but the method {name} "
                    f"holds at least {least[name]}{why}; give a larger budget or longer documents"
                )


def _evaluate_one(
    retrofitted: Retrofit, documents: list[Tensor], questions: list[list[Question]], name: str, share: float, chunk: int
) -> dict[str, Any]:
    tokens, budget = peak_tokens(retrofitted, share, documents[0].shape[1])
    dial = find_dial(retrofitted, documents, budget, chunk) if name == "expire" else 1.0
    device = documents[0].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with method(retrofitted, name, tokens, dial) as new_cache:
        losses, peaks, seconds = [], [], 0.0
        for ids in documents:
            cache = new_cache()
            loss, held = read(retrofitted.model, cache, ids, chunk)
            losses += loss.double().mean(1).tolist()
            peaks += held.tolist()
            seconds = seconds or time_per_token(retrofitted.model, cache, ids[:, -1:])
        right = [x for batch in questions for x in find_right_answers(retrofitted.model, new_cache(), batch, chunk)]
    line: dict[str, Any] = dict(
        method=name, budget=share, losses=losses, perplexity=float(numpy.exp(numpy.mean(losses)))
    )
    line |= dict(peak_bytes=max(peaks), mean_peak_bytes=sum(peaks) / len(peaks), budget_bytes=budget, dial=dial)
    line |= dict(seconds_per_token=seconds, right=right, accuracy=sum(right) / len(right) if right else None)
    line["accuracies"] = _by_kind([q.kind for batch in questions for q in batch], right)
    line["allocator_peak"] = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return line


def _in_batches(questions: list[Question], rows: int) -> list[list[Question]]:
    """Batches of at most `rows` questions whose contexts have the same length."""
    batches = []
    for length in dict.fromkeys(len(q.context) for q in questions):
        same = [q for q in questions if len(q.context) == length]
        batches += [same[n : n + rows] for n in range(0, len(same), rows)]
    return batches


def _by_kind(kinds: list[str], right: list[bool]) -> dict[str, float]:
    """The share of right answers of each kind of question."""
    return {
        kind: sum(r for k, r in zip(kinds, right) if k == kind) / kinds.count(kind) for kind in dict.fromkeys(kinds)
    }


def bootstrap(
    ours: Sequence[float], theirs: Sequence[float], rounds: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Mean difference of two methods' losses on the same documents, and its 95% interval by resampling documents."""
    difference = numpy.array(ours, dtype=float) - numpy.array(theirs, dtype=float)
    rng = numpy.random.default_rng(seed)
    means = difference[rng.integers(len(difference), size=(rounds, len(difference)))].mean(1)
    low, high = numpy.quantile(means, [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)
