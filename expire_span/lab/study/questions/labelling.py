"""Long-range token labelling: each question must be labelled with the colour that a note, far away, gives to its name.

A sequence is mostly filler. A few *notes* say "this name has this colour", one for each of some names. *Rumours* look the
same, but mean nothing. *Questions* name a name, at least `min_distance` steps from its note: before it or after it with
`direction="both"` (for encoders), only after it with `direction="past"` (for decoders).

With `chores`, the sequence begins with a *topic*, and some of the fillers, drawn at random, must be labelled with it. Since
nothing shows which fillers are scored, all of them must attend to the topic.

Tokens: notes 0..N*C-1 (name * C + colour), rumours, questions (one for each name), fillers, topics. Labels: colours, then
topics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from expire_span.tasks.contract import Batch, Score, Split, Symbols

SPLITS: tuple[Split, ...] = ("train", "valid", "test")
EVAL_BATCHES = 8
"""Number of batches of the valid and of the test split."""


@dataclass(frozen=True)
class LabellingTask:
    length: int = 384
    """Tokens of a sequence of the valid and test splits."""
    min_length: int = 24
    """Training batches have lengths between this and `length`, log-uniform, since short ones are learned first."""
    names: int = 6
    """Number of names; each has one note in a sequence."""
    colours: int = 4
    questions: float = 0.1
    """Share of the positions that hold a question."""
    min_distance: int = 64
    """Least number of steps between a question and its note; in sequences shorter than four times this, a quarter of them."""
    max_distance: int | None = None
    """Largest number of steps between them; None: no limit."""
    rumours: float = 0.1
    """Share of the filler positions that hold a rumour."""
    fillers: int = 8
    """Number of kinds of plain filler."""
    chores: float = 0.0
    """Share of the fillers that must be labelled with the sequence's topic; 0 leaves topics out."""
    direction: Literal["both", "past"] = "both"
    """Where questions lie: on either side of their note, or after it."""


class Labelling:
    """Only questions are scored: the target is the colour of the note with the same name."""

    score = Score("accuracy", higher_is_better=True)

    def __init__(self, config: LabellingTask) -> None:
        self.config = config
        kinds = config.names * config.colours
        self.first_rumour, self.first_question = kinds, 2 * kinds
        self.first_filler = self.first_question + config.names
        self.first_topic = self.first_filler + config.fillers
        self.codec = Symbols(self.first_topic + config.colours, str)

    def stream(self, split: Split, *, batch: int, block: int = 0, seed: int) -> Sequences:
        return Sequences(self, split, batch, seed)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def show(self, tokens: Tensor) -> list[str]:
        return [self.label(token) for token in tokens.tolist()]

    def label(self, token: int) -> str:
        if token < self.first_question:
            kind, rest = ("note", "rumour")[token // self.first_rumour], token % self.first_rumour
            return f"{kind} {rest // self.config.colours}={rest % self.config.colours}"
        if token < self.first_filler:
            return f"question {token - self.first_question}"
        if token < self.first_topic:
            return f"filler {token - self.first_filler}"
        return f"topic {token - self.first_topic}"

    def asked(self, batch: Batch) -> Tensor:
        """Where questions are scored, [B, T]; chores are not among them."""
        return batch.mask & (batch.x >= self.first_question) & (batch.x < self.first_filler)


class Sequences:
    """Batches by number: each is drawn from a generator of its own, so that the place in the data is one counter."""

    def __init__(self, task: Labelling, split: Split, batch: int, seed: int) -> None:
        self.task, self.split, self.size, self.seed, self.place = task, split, batch, seed, 0

    def __iter__(self) -> Sequences:
        return self

    def __next__(self) -> Batch:
        if self.split != "train" and self.place >= EVAL_BATCHES:
            raise StopIteration
        rng = np.random.default_rng([self.seed, SPLITS.index(self.split), self.place])
        self.place += 1
        config = self.task.config
        length = config.length
        if self.split == "train":
            length = round(config.min_length * (config.length / config.min_length) ** rng.random())
        rows = [draw_sequence(self.task, length, rng) for _ in range(self.size * config.length // length)]
        x, y = (torch.from_numpy(np.stack(part)) for part in zip(*rows))
        return Batch(x, y.clamp_min(0), y >= 0, torch.ones(len(x), dtype=torch.bool))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


def draw_sequence(task: Labelling, length: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Tokens [T] and targets [T], -1 where nothing is asked."""
    c = task.config
    x = task.first_filler + rng.integers(c.fillers, size=length)
    rumours = rng.random(length) < c.rumours
    x = np.where(rumours, task.first_rumour + rng.integers(c.names * c.colours, size=length), x)
    apart = min(c.min_distance, length // 4)
    last = length - apart if c.direction == "past" else length
    places = 1 + rng.permutation(last - 1)[: c.names]  # of the notes, by name; the first place is the topic's
    colours = rng.integers(c.colours, size=c.names)
    asked, name = _draw_questions(c, places, length, apart, rng)
    x[places] = np.arange(c.names) * c.colours + colours
    x[asked] = task.first_question + name
    y = np.full(length, -1)
    y[asked] = colours[name]
    if c.chores:
        topic = rng.integers(c.colours)
        is_filler = (x >= task.first_filler) & (np.arange(length) > 0)
        x[0], y[0] = task.first_topic + topic, -1
        y[is_filler & (rng.random(length) < c.chores)] = c.colours + topic
    return x, y


def _draw_questions(
    c: LabellingTask, places: np.ndarray, length: int, apart: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and names of the questions, each at an allowed distance from its note and no two at one position."""
    away = np.arange(length)[:, None] - places  # [T, names], > 0 after the note
    away = away if c.direction == "past" else np.abs(away)
    fits = (away >= apart) & (away <= (c.max_distance or length))
    fits[places], fits[0] = False, False
    name = np.where(fits, rng.random(fits.shape), -1).argmax(1)
    places = np.flatnonzero(fits.any(1))
    asked = rng.permutation(places)[: max(1, round(c.questions * length))]
    return asked, name[asked]
