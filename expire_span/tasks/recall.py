"""A colour cue, a long corridor of distracting observations, then "which colour?": the supervised twin of the corridor.

Every token of every episode is a hash of (seed, split, episode, step). So any episode can be generated alone, in any order, on
any process, and the place in the data is a few counters.

Tokens: cues 0..C-1, niches C..2C-1 (the same colours, but they mean nothing), walls, the question, "none", padding.

Why `blank_prob`: with a cue in every episode, a model could forget one colour at once and answer it whenever it remembers no
other. Episodes that begin with a wall instead of a cue, and must be answered with "none", make that fail.
"""

from __future__ import annotations

import numpy as np
import torch

from expire_span.settings.tasks import RecallTask

from .contract import Batch, Score, Split, Symbols
from .episodes import EVAL_EPISODES, PackedEpisodes, WholeEpisodes, below, chance, key_of
from .hashing import draws_of

COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "pink", "brown")


class Recall:
    """Only the question is scored: its target is the token of the cue, or "none" where there was no cue."""

    score = Score("success", higher_is_better=True)

    def __init__(self, config: RecallTask) -> None:
        self.config = config
        self.first_wall = 2 * config.colours
        self.question = self.first_wall + config.distractors
        self.none = self.question + 1
        self.pad = self.none + 1
        self.codec = Symbols(self.pad + 1, self.label)
        self.longest = config.max_length + 2

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> WholeEpisodes | PackedEpisodes:
        """One episode per row where a block can hold the longest; otherwise episode after episode, memory carried."""
        kind = WholeEpisodes if block >= self.longest else PackedEpisodes
        return kind(Episodes(self, split, seed), batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def label(self, token: int) -> str:
        if token < self.first_wall:
            kind, colour = ("cue", "niche")[token // self.config.colours], token % self.config.colours
            return f"{kind} {COLOURS[colour] if colour < len(COLOURS) else f'colour {colour}'}"
        if token < self.question:
            return f"wall {token - self.first_wall}"
        return ("which?", "none", "pad")[token - self.question]


class Episodes:
    """Episodes by number. The valid and test splits hold `EVAL_EPISODES`; training never ends."""

    def __init__(self, task: Recall, split: Split, seed: int) -> None:
        self.task, self.pad = task, task.pad
        self.shortest = task.config.min_length + 2
        self.count = None if split == "train" else EVAL_EPISODES
        self.key = key_of(split, seed)

    def widths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each episode: the cue, the corridor, the question."""
        return self.lengths(numbers) + 2

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Corridor lengths of the episodes, uniform between the configured ends."""
        low, high = self.task.config.min_length, self.task.config.max_length
        return low + below(self._draws(numbers, 0), high - low + 1)

    def answers(self, numbers: np.ndarray) -> np.ndarray:
        """The token of the cue, or "none" in a blank episode."""
        draws, config = self._draws(numbers, 1), self.task.config
        return np.where(chance(draws, config.blank_prob), self.task.none, below(draws << np.uint64(32), config.colours))

    def tokens(self, numbers: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The token at each step of each episode; numbers and steps have one shape. Past the question: padding."""
        task, config = self.task, self.task.config
        draws = self._draws(numbers, steps + 1)
        coloured = config.colours + below(draws << np.uint64(32), config.colours)
        walls = task.first_wall + below(draws << np.uint64(32), config.distractors)
        tokens = np.where(chance(draws, config.distractor_prob), coloured, walls)
        ends = self.lengths(numbers) + 1
        tokens = np.where(steps == ends, task.question, np.where(steps > ends, task.pad, tokens))
        answers = self.answers(numbers)
        return np.where(steps == 0, np.where(answers == task.none, walls, answers), tokens)

    def batch(self, numbers: np.ndarray, steps: np.ndarray, fresh: np.ndarray) -> Batch:
        """Tokens, targets and the scored positions at [B, T] places."""
        x = self.tokens(numbers, steps)
        mask = x == self.task.question
        y = np.where(mask, self.answers(numbers), 0)
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _draws(self, numbers: np.ndarray, steps: np.ndarray | int) -> np.ndarray:
        return draws_of(self.key, numbers, steps)
