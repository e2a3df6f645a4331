"""A colour cue, a long corridor of distracting observations, then "which colour?": the supervised twin of the corridor.

Every token of every episode is a hash of (seed, split, episode, step): any episode can be drawn alone, in any order, on
any process, and the place in the data is a handful of counters.

Tokens: cues 0..C-1, niches C..2C-1 (the same colours, but they mean nothing), walls, the question, "none", padding.

Why `blank_prob`: with a cue in every episode, a model may forget one colour at once and answer it whenever it remembers no
other. Episodes that begin with a mere wall, and are answered with "none", take that way out.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.config import RecallTask

from .task import Batch, Score, Split

EVAL_EPISODES = 512
"""Episodes of the valid and of the test split."""
GROUP = 16
"""Whole-episode batches whose episodes are sorted by length together, so that rows of a batch need little padding."""
COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "pink", "brown")
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


class Recall:
    """Only the question is scored: its target is the token of the cue, or "none" where there was no cue."""

    score = Score("success", higher_is_better=True)

    def __init__(self, config: RecallTask) -> None:
        self.config = config
        self.first_wall = 2 * config.colours
        self.question = self.first_wall + config.distractors
        self.none = self.question + 1
        self.pad = self.none + 1
        self.vocab = self.pad + 1
        self.longest = config.max_length + 2

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> WholeEpisodes | PackedEpisodes:
        """One episode per row where a block can hold the longest; otherwise episode after episode, memory carried."""
        kind = WholeEpisodes if block >= self.longest else PackedEpisodes
        return kind(Episodes(self, split, seed), batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def show(self, tokens: Tensor) -> list[str]:
        return [self.label(token) for token in tokens.tolist()]

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
        self.task, self.split = task, split
        self.count = None if split == "train" else EVAL_EPISODES
        self.key = mix(np.uint64((seed * len(SPLITS) + SPLITS.index(split)) % 2**64))

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
        return mix(mix(self.key + numbers.astype(np.uint64)) + np.asarray(steps).astype(np.uint64))


class WholeEpisodes:
    """One episode per row, every block fresh. Rows of a batch have like lengths; a block is as wide as its longest."""

    def __init__(self, episodes: Episodes, *, batch: int, block: int) -> None:
        self.episodes, self.size, self.place = episodes, batch, 0

    def __iter__(self) -> WholeEpisodes:
        return self

    def __next__(self) -> Batch:
        numbers = self._numbers(self.place)
        if not len(numbers):
            raise StopIteration
        self.place += 1
        width = int(self.episodes.lengths(numbers).max()) + 2
        numbers = np.broadcast_to(numbers[:, None], (len(numbers), width))
        steps = np.broadcast_to(np.arange(width), numbers.shape)
        return self.episodes.batch(numbers, steps, np.ones(len(numbers), bool))

    def _numbers(self, place: int) -> np.ndarray:
        """Episodes of one batch: each group of batches is sorted by length, and its batches come in a drawn order."""
        group, turn = divmod(place, GROUP)
        numbers = np.arange(group * GROUP * self.size, (group + 1) * GROUP * self.size)
        if self.episodes.count is not None:
            numbers = numbers[numbers < self.episodes.count]
        numbers = numbers[np.argsort(self.episodes.lengths(numbers), kind="stable")]
        batches = -(-len(numbers) // self.size)
        if turn >= batches:
            return numbers[:0]
        order = np.argsort(mix(self.episodes.key + np.arange(group * GROUP, group * GROUP + batches, dtype=np.uint64)))
        start = int(order[turn]) * self.size
        return numbers[start : start + self.size]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class PackedEpisodes:
    """Rows of episodes, one after another; row r has the episodes r, r + batch, ... Only the first block is fresh."""

    def __init__(self, episodes: Episodes, *, batch: int, block: int) -> None:
        self.episodes, self.block = episodes, block
        self.numbers, self.steps = np.arange(batch), np.zeros(batch, np.int64)
        self.first = True

    def __iter__(self) -> PackedEpisodes:
        return self

    def __next__(self) -> Batch:
        if self.episodes.count is not None and self.numbers.min() >= self.episodes.count:
            raise StopIteration
        numbers, steps = self._places()
        fresh = np.full(len(self.numbers), self.first)
        self.numbers, self.steps, self.first = numbers[:, -1], steps[:, -1], False
        out = self.episodes.batch(numbers[:, :-1], steps[:, :-1], fresh)
        return self._without_surplus(out, numbers[:, :-1])

    def _places(self) -> tuple[np.ndarray, np.ndarray]:
        """Episode number and step of each position of the block and of the one after it, [B, T + 1]."""
        rows = len(self.numbers)
        most = self.block // (self.episodes.task.config.min_length + 2) + 2
        numbers = self.numbers[:, None] + rows * np.arange(most)  # [B, episodes]
        ends = np.cumsum(self.episodes.lengths(numbers) + 2, axis=1) - self.steps[:, None]
        at = np.arange(self.block + 1)
        which = (at[None, :, None] >= ends[:, None, :]).sum(-1)  # [B, T + 1]
        begins = np.concatenate([-self.steps[:, None], ends], axis=1)
        return np.take_along_axis(numbers, which, 1), at - np.take_along_axis(begins, which, 1)

    def _without_surplus(self, out: Batch, numbers: np.ndarray) -> Batch:
        """In a finite split, rows that have run out of episodes are padded."""
        if self.episodes.count is not None:
            over = torch.from_numpy(numbers >= self.episodes.count)
            out.x, out.mask = out.x.masked_fill(over, self.episodes.task.pad), out.mask & ~over
            out.y = out.y.masked_fill(over, 0)
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"numbers": self.numbers.tolist(), "steps": self.steps.tolist(), "first": self.first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, now = len(state["numbers"]), len(self.numbers)
        if saved != now:
            raise ValueError(f"the saved place has {saved} rows but the batch is {now}; resume with batch {saved}")
        self.numbers, self.steps = np.array(state["numbers"]), np.array(state["steps"])
        self.first = state["first"]


def mix(x: np.ndarray | np.uint64) -> np.ndarray:
    """Scramble 64-bit numbers: a Weyl step and the finaliser of splitmix64, elementwise."""
    z = np.atleast_1d(np.asarray(x, np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def chance(draws: np.ndarray, share: float) -> np.ndarray:
    """True with probability `share`, from the upper 32 bits of 64-bit draws."""
    return (draws >> np.uint64(32)).astype(np.float64) < share * 2.0**32


def below(draws: np.ndarray, limit: int) -> np.ndarray:
    """Uniform integers in [0, limit) from the upper 32 bits of 64-bit draws."""
    return (((draws >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)
