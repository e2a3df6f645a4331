"""How well the memories that an agent kept match those that it needed.

An environment may report, for each observation, which fact it shows and until which step that fact is needed (`fact`,
`needed_until`). A memory is kept until its span and the ramp are over, or its episode ends. Then, summed over memories and
facts:

    precision = steps at which a memory was kept and needed / steps at which it was kept
    recall    = steps at which a fact was needed and some memory of it was kept / steps at which it was needed
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expire_span.models.policy import Policy
from expire_span.ops.rule import lifetime


@dataclass(frozen=True)
class Retention:
    precision: float | None
    """None where the environment does not report what is needed."""
    recall: float | None
    lifetime: list[float]
    """Mean lifetime of a memory in steps, if its episode does not end before, one number per layer that learns spans."""
    lifetime_spread: list[float]
    """Standard deviation of the lifetime, one number per layer that learns spans."""


class RetentionCounter:
    """Records, for every row and step, how long the memory lives and how long it is needed; sums them when an episode ends."""

    def __init__(self, policy: Policy, rows: int) -> None:
        ramps = [getattr(getattr(block.mixer, "span_predictor", None), "ramp", None) for block in policy.layers()]
        self.ramps = [ramp for ramp in ramps if ramp is not None]
        self.told = False
        self.births: list[list[tuple[int, int, int]]] = [[] for _ in range(rows)]  # fact, needed until, kept until
        self.kept = self.useful = self.wanted = self.covered = 0
        self.lives: list[Tensor] = []

    def add(self, aux: Any, facts: dict[str, Tensor]) -> None:
        """Record which fact this step's observation shows, until when it is needed, and until when any layer keeps it."""
        spans = [part.span for part in aux.layers if part.span is not None]
        if not spans or len(self.ramps) != len(spans):
            return
        # The last age at which a memory is alive, [layers, B].
        lives = torch.stack([lifetime(_longest(s), r).float() - 1 for s, r in zip(spans, self.ramps)]).clamp_min(0)
        self.lives.append(lives)
        self.told = "needed_until" in facts and "fact" in facts
        longest = lives.amax(0).long().tolist()
        none = [-1] * len(longest)
        fact = facts["fact"].tolist() if self.told else none
        until = facts["needed_until"].tolist() if self.told else none
        for past, *birth in zip(self.births, fact, until, longest):
            past.append((birth[0], birth[1], len(past) + birth[2]))

    def end(self, row: int, steps: int, *, counts: bool) -> None:
        """The episode of a row is over after `steps` steps; its memories are added to the sums if it `counts`."""
        births, self.births[row] = self.births[row], []
        if not (counts and self.told and births):
            return
        last = steps - 1
        shown: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for birth, (fact, until, kept) in enumerate(births):
            kept, until = min(kept, last), min(until, last) if fact >= 0 else birth
            self.kept += kept - birth
            self.useful += max(min(kept, until) - birth, 0)
            if fact >= 0:
                shown[fact].append((birth, until, kept))
        for memories in shown.values():
            self._cover(memories)

    def _cover(self, memories: list[tuple[int, int, int]]) -> None:
        """Add, for one fact, the steps at which it was needed, and those at which also some memory of it was kept."""
        covered_until = -1  # the last step that the memories born so far cover
        for n, (birth, until, kept) in enumerate(memories):
            stop = min(until, memories[n + 1][0]) if n + 1 < len(memories) else until
            covered_until = max(covered_until, kept)
            self.wanted += max(stop - birth, 0)
            self.covered += max(min(stop, covered_until) - birth, 0)

    def result(self) -> Retention | None:
        if not self.lives:
            return None
        lives = torch.stack(self.lives).transpose(0, 1).flatten(1)  # [layers, steps x B]
        share = lambda part, whole: part / whole if whole else math.nan  # noqa: E731
        precision, recall = share(self.useful, self.kept), share(self.covered, self.wanted)
        told = (precision, recall) if self.told else (None, None)
        return Retention(*told, lives.mean(1).tolist(), lives.std(1, correction=0).tolist())


def _longest(span: Tensor) -> Tensor:
    """Spans of one step [B, 1] or [B, heads, 1]: the longest of a row's heads, [B]."""
    return span.float().flatten(1).amax(1)
