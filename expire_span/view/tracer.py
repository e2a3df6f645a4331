"""A `Tracer` drives a decoder and writes down what happens, step by step; see trace.py for the format.

It uses public results only: the spans of new tokens, the logits, the state. A memory born at i with span e is dead for the
query at t when e + ramp - (t - i) <= 0, so its death is known at its birth, and deleting changes nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.generate import Sampling, narrow
from expire_span.memory import ExpiringMemory
from expire_span.models.decoder import Decoder

from .trace import VERSION, Line

READ_BLOCK = 256
"""Tokens read at once where spans say exactly what lives at each step."""
COARSE_BLOCK = 32
"""Tokens read at once where only the block's mean is known."""
GUESSES = 4
"""Likeliest next tokens that a step names."""
HIDDEN_UNITS = 64
"""Units of a recurrent state that a step shows at most."""


@dataclass
class Ledger:
    """Who is alive: memories of every layer and head, with the step at which each dies."""

    layers: int
    heads: int
    due: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Heap of (death, layer, head, birth)."""
    gone: set[tuple[int, int, int]] = field(default_factory=set)
    """(layer, head, birth) that a cap evicted before their time."""
    alive: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alive = [[0] * self.heads for _ in range(self.layers)]

    def add(self, layer: int, head: int, birth: int, span: float, ramp: float) -> None:
        # In float32, as the store compares: a sum that rounds onto a whole number must die there in both.
        death = birth + max(math.ceil(np.float32(span) + np.float32(ramp)), 0)
        heapq.heappush(self.due, (death, layer, head, birth))
        self.alive[layer][head] += 1

    def expire(self, now: int) -> list[list[int]]:
        """Take out what is dead for the query at `now`; [layer, head, birth] each."""
        deaths = []
        while self.due and self.due[0][0] <= now:
            _, layer, head, birth = heapq.heappop(self.due)
            if (layer, head, birth) in self.gone:
                self.gone.discard((layer, head, birth))
                continue
            self.alive[layer][head] -= 1
            deaths.append([layer, head, birth])
        return deaths

    def evict(self, layer: int, head: int, kept: set[int]) -> list[list[int]]:
        """Take out living memories that the store no longer has."""
        births = [b for _, m, h, b in self.due if (m, h) == (layer, head) and (m, h, b) not in self.gone]
        lost = [[layer, head, birth] for birth in sorted(births) if birth not in kept]
        self.gone.update((layer, head, birth) for _, _, birth in lost)
        self.alive[layer][head] -= len(lost)
        return lost


class Tracer:
    """`header()`, then `read(tokens)` and `generate(sampling)` as often as wished: memory is carried from one to the next."""

    def __init__(self, decoder: Decoder, *, name: str, task: str, about: str = "", show: Any = None) -> None:
        self.decoder = decoder.eval()
        self.config = decoder.config
        self.name, self.task, self.about = name, task, about
        self.vocabulary = {"text": "bytes", "words": "words", "tokens": "tokens"}.get(task, "symbols")
        self.show = show or (lambda tokens: [str(token) for token in tokens.tolist()])
        self.state: Any = None
        self.logits: Tensor | None = None
        self.position = 0
        mixer = self.config.mixer
        self.ramp = float(getattr(mixer, "ramp", 1))
        self.cap = getattr(mixer, "cap", None)
        self.offset = getattr(mixer, "initial_memories", 0)
        self.recurrent = _hidden(decoder.initial_state(1)) is not None
        self.heads, self.spans = self._probe()
        self.ledger = Ledger(self.config.layers, self.heads)

    @torch.inference_mode()
    def _probe(self) -> tuple[int, bool]:
        """How many spans a layer gives a token (1, or one for each key/value head), and whether it gives any."""
        span = self.decoder(self._row([0]), None)[2].layers[0].span
        return (span.shape[1] if span is not None and span.dim() == 3 else 1), span is not None

    def _row(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], dtype=torch.long, device=self.decoder.embed.weight.device)

    @property
    def memory_bytes(self) -> int:
        """Bytes of one memory: keys and values of the heads that share its span, its position and the span."""
        heads = 1 if self.heads > 1 else self.config.num_kv_heads
        return heads * self._pair + 12

    @property
    def _pair(self) -> int:
        return 2 * self.config.head_dim * self.decoder.embed.weight.element_size()

    def header(self) -> Line:
        mixer, kind = self.config.mixer, self.config.mixer.kind
        limit = getattr(mixer, "max_span", None) or getattr(mixer, "span", None)
        return {
            "kind": "header",
            "version": VERSION,
            "name": self.name,
            "task": self.task,
            "about": self.about,
            "system": kind,
            "layers": self.config.layers,
            "heads": self.heads,
            "max_span": limit if self.spans else None,
            "ramp": self.ramp,
            "cap": self.cap,
            "vocabulary": self.vocabulary,
            "memory_bytes": self.memory_bytes if self.spans else None,
            "full_bytes": self.config.num_kv_heads * self._pair + 12,
        }

    def read(self, tokens: Tensor, answers: dict[int, int] | None = None) -> Iterator[Line]:
        """Steps for tokens [T]; `answers` names the wanted token at the places where a task asks for one."""
        for block in tokens.split(self._pace()):
            yield from self._advance(block.tolist(), answers or {})

    def generate(self, sampling: Sampling, max_tokens: int) -> Iterator[Line]:
        """Steps for tokens that the model draws itself; something must have been read before."""
        if self.logits is None:
            raise ValueError("generating needs a token to go on from, got none; read a prompt first")
        generator = torch.Generator().manual_seed(sampling.seed)
        for _ in range(max_tokens):
            chances = narrow(self.logits.unsqueeze(0), sampling)
            (token,) = torch.multinomial(chances[0], 1, generator=generator).tolist()
            yield from self._advance([token], {})

    def _pace(self) -> int:
        if self.recurrent or self.cap is not None:
            return 1  # hidden states and evictions are seen only between blocks
        return READ_BLOCK if self.spans else COARSE_BLOCK

    def _advance(self, tokens: list[int], answers: dict[int, int]) -> Iterator[Line]:
        with torch.inference_mode():
            logits, self.state, aux = self.decoder(self._row(tokens), self.state)
            logs = logits[0].float().log_softmax(-1).cpu()  # [T, V]
        costs = self._costs(logs, tokens)
        guesses, texts = self._guesses(logs), self.show(torch.tensor(tokens))
        spans = [_by_head(layer.span) for layer in aux.layers] if self.spans else None
        self.logits = logits[0, -1].float().cpu()
        for n, token in enumerate(tokens):
            i = self.position
            step: Line = {"kind": "step", "i": i, "token": token, "text": texts[n], "bits": costs[n], "top": guesses[n]}
            if i in answers:
                step["answer"] = self._answer(logs[n], answers[i])
            step |= self._born([layer[n] for layer in spans]) if spans else self._held(aux)
            if self.recurrent:
                step["hidden"] = _hidden(self.state)
            self.position += 1
            yield step

    def _costs(self, logs: Tensor, tokens: list[int]) -> list[float | None]:
        """Bits of each token, as predicted from those before it; None where the task predicts something else."""
        if self.vocabulary == "symbols":
            return [None] * len(tokens)
        first = None if self.logits is None else -float(self.logits.log_softmax(-1)[tokens[0]]) / math.log(2)
        later = -logs[:-1].gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1) / math.log(2)
        return [None if first is None else _round(first), *(_round(x) for x in later.tolist())]

    def _guesses(self, logs: Tensor) -> list[list[list[Any]]]:
        """Per step the likeliest next tokens, [text, probability] each."""
        best, which = logs.topk(min(GUESSES, logs.shape[1]), -1)
        names = self.show(which.flatten())
        count = best.shape[1]
        return [
            [[names[n * count + k], _round(math.exp(x))] for k, x in enumerate(row)]
            for n, row in enumerate(best.tolist())
        ]

    def _answer(self, logs: Tensor, wanted: int) -> Line:
        (text,) = self.show(torch.tensor([wanted]))
        return {"text": text, "bits": _round(-float(logs[wanted]) / math.log(2))}

    def _born(self, spans: list[list[float]]) -> Line:
        """Births, deaths and what lives, of a system with spans [layers][heads]."""
        for layer, heads in enumerate(spans):
            for head, span in enumerate(heads):
                self.ledger.add(layer, head, self.position, span, self.ramp)
        deaths = self.ledger.expire(self.position)
        if self.cap is not None:
            deaths += self._evictions()
        alive = self.ledger.alive
        return {
            "spans": [[_round(span) for span in heads] for heads in spans],
            "deaths": deaths,
            "live": [_round(sum(heads) / len(heads)) for heads in alive],
            "bytes": [sum(heads) * self.memory_bytes for heads in alive],
        }

    def _evictions(self) -> list[list[int]]:
        """What a cap has removed from the stores although it lived."""
        lost = []
        for layer, part in enumerate(self.state):
            memory = part.get("memory") if isinstance(part, dict) else None
            if isinstance(memory, ExpiringMemory):
                rows = (memory.pos - self.offset)[0].reshape(-1, len(memory))
                living = (memory.remaining(self.position + self.offset)[0] > -math.inf).reshape(-1, len(memory))
                for head, (births, kept) in enumerate(zip(rows, living)):
                    lost += self.ledger.evict(layer, head, set(births[kept].tolist()))
        return lost

    def _held(self, aux: Any) -> Line:
        """What a system without spans reports: the mean of the block, and the bytes after it."""
        live = [0.0 if layer.live is None else _round(float(layer.live)) for layer in aux.layers]
        return {"spans": None, "deaths": [], "live": live, "bytes": [layer.bytes_held for layer in aux.layers]}


def _by_head(span: Tensor) -> list[list[float]]:
    """[1, T] or [1, H, T] -> [T][H]. Ages are compared in float32, so that is what is written down."""
    rows = span[0].float()
    return (rows.unsqueeze(1) if rows.dim() == 1 else rows.transpose(0, 1)).tolist()


def _hidden(state: Any) -> list[list[float]] | None:
    """The recurrent state of each layer, where that is one vector; else None."""
    parts = [part["h"][0] for part in state if isinstance(part, dict) and isinstance(part.get("h"), Tensor)]
    if len(parts) != len(state) or any(part.dim() != 1 for part in parts):
        return None
    return [[round(x, 3) for x in part[:HIDDEN_UNITS].float().tolist()] for part in parts]


def _round(x: float) -> float:
    """Four decimals are more than a picture shows, and keep the file small."""
    return round(x, 4)
