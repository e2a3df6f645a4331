"""Streams of numbered episodes: one episode per row, or packed one after another.

Every token of every episode is a hash of (seed, split, episode, step). So any episode can be generated alone, in any order, on
any process, and the place in the data is a few counters.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from .contract import SPLITS, Batch, Split
from .hashing import mix

EVAL_EPISODES = 512
"""Episodes of the valid and of the test split."""
GROUP = 16
"""Number of batches whose episodes are sorted by length together, so that rows of a batch need little padding."""


class EpisodeSource(Protocol):
    """Episodes by number."""

    count: int | None
    """How many there are; None where they never end."""
    key: np.ndarray
    """Hash key of this split and seed, on which all draws depend."""
    pad: int
    """The token after an episode's end."""
    shortest: int
    """Number of tokens of the shortest possible episode."""

    def widths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of each episode."""
        ...

    def batch(self, numbers: np.ndarray, steps: np.ndarray, fresh: np.ndarray) -> Batch:
        """Tokens, targets and mask for the given episode numbers and steps, both [B, T]; padding past an episode's end."""
        ...


class WholeEpisodes:
    """One episode per row, every block fresh. Rows of a batch have similar lengths; a block is as wide as its longest row."""

    def __init__(self, episodes: EpisodeSource, *, batch: int, block: int) -> None:
        self.episodes, self.size, self.place = episodes, batch, 0

    def __iter__(self) -> WholeEpisodes:
        return self

    def __next__(self) -> Batch:
        numbers = self.numbers_at(self.place)
        if not len(numbers):
            raise StopIteration
        self.place += 1
        width = int(self.episodes.widths(numbers).max())
        numbers = np.broadcast_to(numbers[:, None], (len(numbers), width))
        steps = np.broadcast_to(np.arange(width), numbers.shape)
        return self.episodes.batch(numbers, steps, np.ones(len(numbers), bool))

    def numbers_at(self, place: int) -> np.ndarray:
        """The episodes of one batch: those of `GROUP` batches are sorted by length, and the batches come in a random order."""
        group, turn = divmod(place, GROUP)
        numbers = np.arange(group * GROUP * self.size, (group + 1) * GROUP * self.size)
        if self.episodes.count is not None:
            numbers = numbers[numbers < self.episodes.count]
        numbers = numbers[np.argsort(self.episodes.widths(numbers), kind="stable")]
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


class BlockedEpisodes:
    """Episodes too long for one block: a batch of them is read block by block, and only its first block is fresh.

    The batches are those of `WholeEpisodes`; rows that end before the longest are padded.
    """

    def __init__(self, episodes: EpisodeSource, *, batch: int, block: int) -> None:
        self.whole, self.block, self.offset = WholeEpisodes(episodes, batch=batch, block=block), block, 0

    def __iter__(self) -> BlockedEpisodes:
        return self

    def __next__(self) -> Batch:
        episodes = self.whole.episodes
        numbers = self.whole.numbers_at(self.whole.place)
        if not len(numbers):
            raise StopIteration
        longest = int(episodes.widths(numbers).max())
        steps = np.arange(self.offset, min(self.offset + self.block, longest))
        places = np.broadcast_to(numbers[:, None], (len(numbers), len(steps)))
        out = episodes.batch(places, np.broadcast_to(steps, places.shape), np.full(len(numbers), self.offset == 0))
        self.offset += len(steps)
        if self.offset >= longest:
            self.offset, self.whole.place = 0, self.whole.place + 1
        return out

    def state_dict(self) -> dict[str, Any]:
        return {**self.whole.state_dict(), "offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.whole.load_state_dict(state)
        self.offset = state["offset"]


class PackedEpisodes:
    """Rows of episodes, one after another; row r has the episodes r, r + batch, ... Only the first block is fresh."""

    def __init__(self, episodes: EpisodeSource, *, batch: int, block: int) -> None:
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
        """Episode number and step of each position of the block, and of the first position after it, [B, T + 1]."""
        rows = len(self.numbers)
        most = self.block // self.episodes.shortest + 2
        numbers = self.numbers[:, None] + rows * np.arange(most)  # [B, episodes]
        ends = np.cumsum(self.episodes.widths(numbers), axis=1) - self.steps[:, None]
        at = np.arange(self.block + 1)
        which = (at[None, :, None] >= ends[:, None, :]).sum(-1)  # [B, T + 1]
        begins = np.concatenate([-self.steps[:, None], ends], axis=1)
        return np.take_along_axis(numbers, which, 1), at - np.take_along_axis(begins, which, 1)

    def _without_surplus(self, out: Batch, numbers: np.ndarray) -> Batch:
        """In a finite split, rows that have run out of episodes are padded."""
        if self.episodes.count is not None:
            over = torch.from_numpy(numbers >= self.episodes.count)
            out.x, out.mask = out.x.masked_fill(over, self.episodes.pad), out.mask & ~over
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


def chance(draws: np.ndarray, share: float | np.ndarray) -> np.ndarray:
    """True with probability `share` (which broadcasts against the draws), from the upper 32 bits of 64-bit draws."""
    return (draws >> np.uint64(32)).astype(np.float64) < share * 2.0**32


def below(draws: np.ndarray, limit: int) -> np.ndarray:
    """Uniform integers in [0, limit) from the upper 32 bits of 64-bit draws."""
    return (((draws >> np.uint64(32)) * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def key_of(split: Split, seed: int) -> np.ndarray:
    """The key that the draws of a split depend on."""
    return mix(np.uint64((seed * len(SPLITS) + SPLITS.index(split)) % 2**64))
