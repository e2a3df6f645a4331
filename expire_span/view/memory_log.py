"""A log of a backbone's memories, step by step: births, deaths, living memories, bytes. Every tracer uses it.

It needs public results only: the spans of new tokens, and the state. By its span, the death of a memory is known at its birth.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from expire_span.models.mixer import MixerAux
from expire_span.ops.rule import lifetime
from expire_span.settings.models import BackboneConfig
from expire_span.store import ExpiringMemory

from .trace import Line

KEPT = float(2**28)
"""Span that a trace gives to memories that are kept for ever: longer than any trace."""
LATEST = 2**30
"""The last step at which a trace says that a memory dies; memories that are kept for good say this one."""
HIDDEN_UNITS = 64
"""Largest number of units of a recurrent state in a step."""


@dataclass
class Ledger:
    """The living memories of every layer and head, with the step at which each dies."""

    layers: int
    heads: int
    due: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Heap of (death, layer, head, birth)."""
    gone: set[tuple[int, int, int]] = field(default_factory=set)
    """(layer, head, birth) of memories that a cap evicted before they expired."""
    alive: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.alive = [[0] * self.heads for _ in range(self.layers)]

    def add(self, birth: int, spans: Sequence[Sequence[float]], ramp: float) -> list[list[int]]:
        """Add the memories of one step, one for each layer and head; spans [layers][heads]. Returns when each dies."""
        lives = lifetime(torch.tensor(spans, dtype=torch.float32), ramp)  # [layers][heads]
        dies = (birth + lives).clamp_max(LATEST).tolist()
        for layer, heads in enumerate(dies):
            for head, death in enumerate(heads):
                heapq.heappush(self.due, (death, layer, head, birth))
                self.alive[layer][head] += 1
        return dies

    def expire(self, now: int) -> list[list[int]]:
        """Remove and return the memories that are dead for the query at `now`, each as [layer, head, birth]."""
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
        """Remove and return the living memories that are not among `kept`, the births of those that the store still has."""
        births = [b for _, m, h, b in self.due if (m, h) == (layer, head) and (m, h, b) not in self.gone]
        lost = [[layer, head, birth] for birth in sorted(births) if birth not in kept]
        self.gone.update((layer, head, birth) for _, _, birth in lost)
        self.alive[layer][head] -= len(lost)
        return lost


@dataclass(frozen=True)
class MemoryFacts:
    """Facts that are the same for all memories of a trace; most of them go into its header."""

    system: str
    layers: int
    heads: int
    """Number of spans that a layer gives to a token: 1, or one for each key/value head."""
    ramp: float
    full_bytes: int
    """Bytes that a layer which never forgets adds at each step."""
    memory_bytes: int | None = None
    """Bytes of one memory; None where the system gives no spans."""
    max_span: float | None = None
    cap: int | None = None
    offset: int = 0
    """Position of the first token in the model's own store."""
    hidden: bool = False
    """Whether the state of each layer is one vector, which steps show."""

    @classmethod
    def of(cls, config: BackboneConfig, span: Tensor | None, state: Any, *, element: int) -> MemoryFacts:
        """The facts of a backbone whose keys and values take `element` bytes per number, by what it has read: the spans of the
        first layer, None where it gives none, and the state after it."""
        mixer: Any = config.mixer
        heads = span.shape[1] if span is not None and span.dim() == 3 else 1
        pair = 2 * config.head_dim * element  # one head's key and value
        each = (
            1 if heads > 1 else config.num_kv_heads
        ) * pair + 12  # heads that share a span, its position and the span
        limit = getattr(mixer, "max_span", None) or getattr(mixer, "span", None)
        return cls(
            **{"system": mixer.kind, "layers": config.layers, "heads": heads, "ramp": float(getattr(mixer, "ramp", 1))},
            full_bytes=config.num_kv_heads * pair + 12,
            memory_bytes=None if span is None else each,
            max_span=None if span is None else limit,
            cap=getattr(mixer, "cap", None),
            offset=getattr(getattr(mixer, "paper", None), "initial_memories", 0),
            hidden=hidden_of(state) is not None,
        )

    def header(self) -> Line:
        names = ("system", "layers", "heads", "max_span", "ramp", "cap", "memory_bytes", "full_bytes")
        return {name: getattr(self, name) for name in names}


class MemoryLog:
    """Computes the fields of a trace's steps that describe memory."""

    def __init__(self, facts: MemoryFacts) -> None:
        self.facts = facts
        self.ledger = Ledger(facts.layers, facts.heads)
        self.position = 0

    @property
    def spans(self) -> bool:
        """Whether tokens are given spans."""
        return self.facts.memory_bytes is not None

    def add(self, spans: Sequence[Sequence[float]] | None, state: Any, reports: Sequence[MixerAux]) -> Line:
        """The fields of one more step: from its spans [layers][heads], or, for a system without spans (None), from what the
        layers reported."""
        line = self._held(reports) if spans is None else self._born(spans, state)
        self.position += 1
        return line

    def _born(self, spans: Sequence[Sequence[float]], state: Any) -> Line:
        dies = self.ledger.add(self.position, spans, self.facts.ramp)
        deaths = self.ledger.expire(self.position)
        if self.facts.cap is not None:
            deaths += self._evictions(state)
        alive, each = self.ledger.alive, self.facts.memory_bytes or 0
        return {
            "spans": [[round_off(span) for span in heads] for heads in spans],
            "dies": dies,
            "deaths": deaths,
            "live": [round_off(sum(heads) / len(heads)) for heads in alive],
            "bytes": [sum(heads) * each for heads in alive],
        }

    def _evictions(self, state: Any) -> list[list[int]]:
        """Living memories that a cap has removed from the stores."""
        lost = []
        for layer, part in enumerate(state):
            memory = part.get("memory") if isinstance(part, dict) else None
            if isinstance(memory, ExpiringMemory):
                rows = (memory.pos - self.facts.offset)[0].reshape(-1, len(memory))
                living = (memory.remaining(self.position + self.facts.offset)[0] > -math.inf).reshape(-1, len(memory))
                for head, (births, kept) in enumerate(zip(rows, living)):
                    lost += self.ledger.evict(layer, head, set(births[kept].tolist()))
        return lost

    def _held(self, reports: Sequence[MixerAux]) -> Line:
        """What a system without spans reports: the mean of the block, and the bytes after it."""
        live = [0.0 if layer.live is None else round_off(float(layer.live)) for layer in reports]
        return {
            "spans": None,
            "dies": None,
            "deaths": [],
            "live": live,
            "bytes": [layer.bytes_held for layer in reports],
        }


def spans_by_head(span: Tensor | None, heads: int) -> list[list[float]]:
    """[1, T] or [1, H, T] -> [T][heads], in float32, in which spans are compared with ages. A layer of fewer heads repeats its
    own."""
    assert span is not None
    rows = span[0].float().clamp_max(KEPT)
    by_token = rows.unsqueeze(1) if rows.dim() == 1 else rows.transpose(0, 1)
    return [(row * heads)[:heads] for row in by_token.tolist()]


def hidden_of(state: Any) -> list[list[float]] | None:
    """The recurrent state of each layer, where that is one vector; else None."""
    parts = [part["h"][0] for part in state if isinstance(part, dict) and isinstance(part.get("h"), Tensor)]
    if len(parts) != len(state) or any(part.dim() != 1 for part in parts):
        return None
    return [[round(x, 3) for x in part[:HIDDEN_UNITS].float().tolist()] for part in parts]


def round_off(x: float) -> float:
    """Four decimals are more than a picture shows, and keep the file small."""
    return round(x, 4)
