"""How many tokens of prompts are read in one call: running answers wait for it, no longer than a stated time."""

from __future__ import annotations

from typing import Any

from expire_span.checks import show
from expire_span.stream.decoders import model_of

PAUSE = 1.0
"""Seconds for which running answers wait at most while a part of a prompt is read, on a CPU, unless a server is given another
number."""
CHUNK = 640
"""Most tokens that are read in one call on a CPU. More cost hardly less per token there."""
CAPPED_CHUNK = 256
"""Tokens in every call for a model whose cap evicts at the end of a call: its answers must not depend on what else runs."""
GPU_CHUNK, GPU_SHARED_CHUNK = 32_768, 8_192
"""On a GPU, where a call of few tokens takes as long as one of thousands: while nothing else runs, and between two decode
steps."""
STEP = 64
"""Where chunks are timed they are multiples of so many tokens, and at least one."""
WEIGHT = 0.3
"""Weight of the newest chunk in the cost of a token."""


class Pace:
    """The size of the next chunk, by what earlier chunks have cost where there is a longest pause.

    A call costs less per token the longer it is, so that the cost of smaller chunks never makes a larger one too long; only a
    machine that has become slower, or a memory that has grown, does so, for a chunk or two.
    """

    def __init__(self, alone: int, shared: int, pause: float | None = None) -> None:
        """alone, shared: most tokens while nothing else runs, and between two decode steps; pause: most seconds for the latter,
        None for any number."""
        self.alone, self.shared, self.pause = alone, shared, pause
        self.cost: float | None = None
        """Seconds per token, the newest chunks counting most; None before the first."""

    @classmethod
    def of(cls, model: Any, pause: float = PAUSE) -> Pace:
        """The pace at which a model reads prompts, on its device."""
        if not pause > 0:
            raise ValueError(f"pause must be a number of seconds above 0, got {show(pause)}; give {PAUSE}")
        streamed = model_of(model)
        if streamed.device.type == "cuda":
            return cls(GPU_CHUNK, GPU_SHARED_CHUNK)
        return cls(CAPPED_CHUNK, CAPPED_CHUNK) if streamed.capped else cls(CHUNK, CHUNK, pause)

    def chunk(self, shared: bool) -> int:
        """Most tokens of the next call; shared: whether running answers wait for it."""
        if not shared or self.pause is None:
            return self.shared if shared else self.alone
        if self.cost is None:
            return STEP
        fitting = int(min(self.pause / self.cost, self.shared))  # a pause may be endless
        return min(self.shared, max(STEP, fitting // STEP * STEP))

    def note(self, tokens: int, seconds: float) -> None:
        """Learn from a call. One of fewer than `STEP` tokens says little about longer ones, and is ignored."""
        if tokens >= STEP:
            cost = max(seconds / tokens, 1e-9)
            self.cost = cost if self.cost is None else WEIGHT * cost + (1 - WEIGHT) * self.cost
