"""Long copy: a few A tokens, filler for thousands of steps, then the question how many A tokens there were.

Re-implemented from the published description. Everything but the A tokens can be forgotten, so a model that learns what to
forget keeps a few memories however long the filler is.

Tokens: the start, A, fillers, the question, padding, then the answers 1, 2, ...
"""

from __future__ import annotations

import numpy as np
import torch

from expire_span.settings.tasks import CopyTask

from .contract import Batch, Score, Split, Symbols
from .episodes import EVAL_EPISODES, BlockedEpisodes, WholeEpisodes, below, key_of
from .hashing import draws_of

START, A, FIRST_FILLER = 0, 1, 2


class Copy:
    """Only the question is scored: its target is the number of A tokens."""

    score = Score("success", higher_is_better=True)

    def __init__(self, config: CopyTask) -> None:
        self.config = config
        self.question = FIRST_FILLER + config.fillers
        self.pad = self.question + 1
        self.first_answer = self.pad + 1
        self.codec = Symbols(self.first_answer + config.max_count, self.label)
        self.longest = config.max_length

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> WholeEpisodes | BlockedEpisodes:
        """One episode per row; those that are longer than a block come block by block with memory carried."""
        kind = WholeEpisodes if block >= self.longest else BlockedEpisodes
        return kind(CopyEpisodes(self, split, seed), batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def label(self, token: int) -> str:
        if token >= self.first_answer:
            return f"count {token - self.first_answer + 1}"
        if FIRST_FILLER <= token < self.question:
            return f"filler {token - FIRST_FILLER}"
        return {START: "start", A: "A", self.question: "how many?", self.pad: "pad"}[token]


class CopyEpisodes:
    """Episodes by number. The valid and test splits hold `EVAL_EPISODES` of full length; training never ends."""

    def __init__(self, task: Copy, split: Split, seed: int) -> None:
        self.task, self.pad, self.split = task, task.pad, split
        self.shortest = task.config.min_length
        self.count = None if split == "train" else EVAL_EPISODES
        self.key = key_of(split, seed)

    def widths(self, numbers: np.ndarray) -> np.ndarray:
        """Number of tokens of each episode. In training, lengths are about log-uniform, so that short episodes teach what to
        keep."""
        low, high = self.task.config.min_length, self.task.config.max_length
        if self.split != "train":
            return np.full(np.shape(numbers), high)
        octaves = np.array([x for x in (low << n for n in range(64)) if x < high] + [high])
        draws, most = self._draws(numbers, 0), max(len(octaves) - 1, 1)
        growth = self.task.config.growth
        reached = np.minimum(1 + numbers // growth, most) if growth else np.full(np.shape(numbers), most)
        which = ((draws >> np.uint64(32)) % reached.astype(np.uint64)).astype(np.int64)
        start, end = octaves[which], octaves[np.minimum(which + 1, len(octaves) - 1)]
        return start + ((draws & np.uint64(0xFFFFFFFF)) % (end - start + 1).astype(np.uint64)).astype(np.int64)

    def counts(self, numbers: np.ndarray) -> np.ndarray:
        """A tokens of each episode."""
        return 1 + below(self._draws(numbers, 1), self.task.config.max_count)

    def batch(self, numbers: np.ndarray, steps: np.ndarray, fresh: np.ndarray) -> Batch:
        """Tokens, targets and the scored positions at [B, T] places."""
        task, ends, counts = self.task, self.widths(numbers) - 1, self.counts(numbers)
        x = FIRST_FILLER + below(self._draws(numbers, steps + 2), task.config.fillers)
        x = np.where(steps <= counts, A, x)
        x = np.where(steps == 0, START, np.where(steps == ends, task.question, np.where(steps > ends, task.pad, x)))
        mask = x == task.question
        y = np.where(mask, task.first_answer + counts - 1, 0)
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _draws(self, numbers: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        return draws_of(self.key, numbers, steps)
