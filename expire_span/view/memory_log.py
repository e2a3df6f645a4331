"""What the memories of a backbone do, step by step: births, deaths, living ones, bytes. Every tracer writes it down with this.

It uses public results only: the spans of new tokens and the state. A memory born at i with span e is dead for the query at t
when e + ramp - (t - i) <= 0, so its death is known at its birth, and deleting changes nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from expire_span.memory import ExpiringMemory
from expire_span.model_configs import BackboneConfig

from .trace import Line

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


class MemoryLog:
    """Fields of a trace that tell of memory: those of the header, and those of each step."""

    def __init__(self, config: BackboneConfig, *, heads: int, spans: bool, element: int) -> None:
        """`heads` is how many spans a layer gives a token, `element` the bytes of a number of a key or value."""
        self.config, self.heads, self.spans = config, heads, spans
        mixer: Any = config.mixer
        self.ramp = float(getattr(mixer, "ramp", 1))
        self.cap = getattr(mixer, "cap", None)
        self.offset = getattr(getattr(mixer, "paper", None), "initial_memories", 0)
        self.pair = 2 * config.head_dim * element
        self.ledger = Ledger(config.layers, heads)
        self.position = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of one memory: keys and values of the heads that share its span, its position and the span."""
        heads = 1 if self.heads > 1 else self.config.num_kv_heads
        return heads * self.pair + 12

    def header(self) -> Line:
        mixer: Any = self.config.mixer
        limit = getattr(mixer, "max_span", None) or getattr(mixer, "span", None)
        return {
            "system": mixer.kind,
            "layers": self.config.layers,
            "heads": self.heads,
            "max_span": limit if self.spans else None,
            "ramp": self.ramp,
            "cap": self.cap,
            "memory_bytes": self.memory_bytes if self.spans else None,
            "full_bytes": self.config.num_kv_heads * self.pair + 12,
        }

    def add(self, spans: Sequence[Sequence[float]] | None, state: Any, aux: Any) -> Line:
        """One more step: its spans [layers][heads], or None where the system gives none and `aux` tells what is held."""
        line = self._held(aux) if spans is None else self._born(spans, state)
        self.position += 1
        return line

    def _born(self, spans: Sequence[Sequence[float]], state: Any) -> Line:
        for layer, heads in enumerate(spans):
            for head, span in enumerate(heads):
                self.ledger.add(layer, head, self.position, span, self.ramp)
        deaths = self.ledger.expire(self.position)
        if self.cap is not None:
            deaths += self._evictions(state)
        alive = self.ledger.alive
        return {
            "spans": [[round_off(span) for span in heads] for heads in spans],
            "deaths": deaths,
            "live": [round_off(sum(heads) / len(heads)) for heads in alive],
            "bytes": [sum(heads) * self.memory_bytes for heads in alive],
        }

    def _evictions(self, state: Any) -> list[list[int]]:
        """What a cap has removed from the stores although it lived."""
        lost = []
        for layer, part in enumerate(state):
            memory = part.get("memory") if isinstance(part, dict) else None
            if isinstance(memory, ExpiringMemory):
                rows = (memory.pos - self.offset)[0].reshape(-1, len(memory))
                living = (memory.remaining(self.position + self.offset)[0] > -math.inf).reshape(-1, len(memory))
                for head, (births, kept) in enumerate(zip(rows, living)):
                    lost += self.ledger.evict(layer, head, set(births[kept].tolist()))
        return lost

    def _held(self, aux: Any) -> Line:
        """What a system without spans reports: the mean of the block, and the bytes after it."""
        live = [0.0 if layer.live is None else round_off(float(layer.live)) for layer in aux.layers]
        return {"spans": None, "deaths": [], "live": live, "bytes": [layer.bytes_held for layer in aux.layers]}


def spans_by_head(span: Tensor) -> list[list[float]]:
    """[1, T] or [1, H, T] -> [T][H]. Ages are compared in float32, so that is what is written down."""
    rows = span[0].float()
    return (rows.unsqueeze(1) if rows.dim() == 1 else rows.transpose(0, 1)).tolist()


def hidden_of(state: Any) -> list[list[float]] | None:
    """The recurrent state of each layer, where that is one vector; else None."""
    parts = [part["h"][0] for part in state if isinstance(part, dict) and isinstance(part.get("h"), Tensor)]
    if len(parts) != len(state) or any(part.dim() != 1 for part in parts):
        return None
    return [[round(x, 3) for x in part[:HIDDEN_UNITS].float().tolist()] for part in parts]


def round_off(x: float) -> float:
    """Four decimals are more than a picture shows, and keep the file small."""
    return round(x, 4)
