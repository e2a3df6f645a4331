"""Asking: contexts are read and compressed, then the question is read, then the answer is written greedily.

Rows of one batch have contexts of equal length. Their questions may differ in length: what goes beyond the shortest one is read
a token at a time, while the others already answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expire_span.hf.cache import ExpiringCache
from expire_span.lab.caches.evaluate import held_bytes, read

from .prompts import Sample
from .scoring import RULES, is_settled

COUNTED = 8
"""Living memories are counted at every so many tokens of an answer."""


@dataclass(frozen=True)
class Outcome:
    """What one prompt gave."""

    answer: str
    score: float
    kept_bytes: int
    """Bytes of the memories that were left of the context: their number times the bytes of one."""
    peak_bytes: int
    """The same at its largest while the context was read, after each chunk."""
    held_bytes: int
    """Bytes of the cache's tensors after the context, spare room included."""
    live: float
    """Mean, over the answer's tokens, of the living memories per head, as a share of the tokens seen."""
    tokens: int
    """Number of tokens of the answer."""


@torch.no_grad()
def ask(model: Any, cache: Any, samples: Sequence[Sample], tokenizer: Any, ends: set[int], chunk: int) -> list[Outcome]:
    """The outcome of each sample; all contexts must have the same length. ends: tokens that end an answer."""
    device = next(model.parameters()).device
    contexts = torch.tensor([x.context for x in samples], device=device)
    _, peak = read(model, cache, contexts, chunk, scored=False)
    kept, held = held_bytes(cache), allocated_bytes(cache) // len(samples)
    shortest = min(len(x.question) for x in samples)
    answers = [Answer(x, shortest, tokenizer, ends) for x in samples]
    live: list[Tensor] = []
    seen = contexts.shape[1]
    given, step = torch.tensor([x.question[:shortest] for x in samples], device=device), 0
    while not all(x.done for x in answers):
        logits = model(given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        seen += given.shape[1]
        best = logits.argmax(-1).tolist()
        if step % COUNTED == 0:
            live.append(living(cache) / seen)
        given = torch.tensor([[x.next(n)] for x, n in zip(answers, best)], device=device)
        step += 1
    shares = torch.stack(live).mean(0)
    rows = zip(answers, kept.tolist(), peak.tolist(), shares.tolist())
    return [
        Outcome(x.text, x.score, int(kept), int(peak), held, float(share), len(x.written))
        for x, kept, peak, share in rows
    ]


class Answer:
    """An answer that is being written: first the rest of its question, then the tokens that the model chooses."""

    def __init__(self, sample: Sample, read: int, tokenizer: Any, ends: set[int]) -> None:
        """read: number of tokens of the question that are read already."""
        self.prompt, self.tokenizer, self.ends = sample.prompt, tokenizer, ends
        self.rest: list[int] = list(sample.question[read:])
        self.written: list[int] = []
        self.text, self.done = "", False

    def next(self, best: int) -> int:
        """The token to read next, given the model's choice; an answer that is done goes on with anything."""
        if self.rest:
            return self.rest.pop(0)
        if not self.done:
            self._write(best)
        return best

    def _write(self, token: int) -> None:
        if token in self.ends:
            self.done = True
            return
        self.written.append(token)
        self.text = self.tokenizer.decode(self.written, skip_special_tokens=True)
        settled = is_settled(self.prompt.rule, self.text, self.prompt.answers)
        self.done = settled or len(self.written) >= self.prompt.most_tokens

    @property
    def score(self) -> float:
        return RULES[self.prompt.rule](self.text, self.prompt.answers)


def living(cache: Any) -> Tensor:
    """Mean number of living memories per head, over heads and layers, of each row [B]."""
    if isinstance(cache, ExpiringCache):
        counts = [x.float() for x in cache.live()]  # [B, Hkv] of each layer
        return torch.cat(counts, -1).mean(-1)
    sizes = [x.keys.shape[-2] for x in cache.layers if x.is_initialized]
    keys = cache.layers[0].keys
    return torch.full((len(keys),), sum(sizes) / len(sizes), device=keys.device)


def allocated_bytes(cache: Any) -> int:
    """Bytes of a cache's tensors, all rows together."""
    if isinstance(cache, ExpiringCache):
        return cache.bytes_held
    pairs = [(x.keys, x.values) for x in cache.layers if x.is_initialized]
    return sum(x.numel() * x.element_size() for pair in pairs for x in pair)


def in_batches(samples: Sequence[Sample], rows: int) -> list[list[Sample]]:
    """Batches of at most `rows` samples whose contexts have the same length. Those that may write answers of similar length
    stand together, since a batch takes as many steps as its longest answer."""
    batches = []
    for length in dict.fromkeys(len(x.context) for x in samples):
        same = sorted((x for x in samples if len(x.context) == length), key=lambda x: x.prompt.most_tokens)
        batches += [same[n : n + rows] for n in range(0, len(same), rows)]
    return batches
