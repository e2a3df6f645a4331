"""Supervised versions ("twins") of the grid worlds: an expert plays, and a decoder predicts its action where memory is needed.

Episode n of a split is the engine's episode of environment n, so every episode can be played alone. A few hundred are played
side by side and cached until the stream has moved on. Every distinct observation is one token (Corridor: what is above and what
is below; Portal: room, layout and cell; Instruction: the words of the sentence); the actions are further tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from expire_span.settings.tasks import CorridorTask, InstructionTask, PortalTask

from .contract import SPLITS, Batch, Score, Split, Symbols
from .episodes import EVAL_EPISODES, BlockedEpisodes, WholeEpisodes, key_of
from .gridworlds.corridor import Corridor
from .gridworlds.engine import BALL, BOX, COLOURS, DOOR, LEFT, MOVES, WALL, WorldEngine
from .gridworlds.instruction import Instruction
from .gridworlds.levels import build_engine
from .gridworlds.portal import Portal
from .gridworlds.sentences import LENGTH, OBJECTS, VERBS, WORDS
from .hashing import mix

ROLL = 256
"""Number of episodes that are played side by side: one group."""
STAGE = 16
"""Number of groups after which training moves to the next stage of difficulty; episodes of earlier stages are still mixed
in."""
KEEP = 64
"""Largest number of groups that are cached."""


@dataclass(frozen=True)
class Demonstration:
    """Episodes of an expert as tokens, targets and mask, [B, T] each; `widths` [B] is the number of tokens of each episode."""

    tokens: np.ndarray
    targets: np.ndarray
    scored: np.ndarray
    widths: np.ndarray


class Twin(ABC):
    """What the three twins share: streams, score, labels. `pad` is the last token of the vocabulary."""

    score = Score("success", higher_is_better=True)
    config: Any
    codec: Symbols
    pad: int
    longest: int
    shortest: int

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> WholeEpisodes | BlockedEpisodes:
        """One episode per row; those that are longer than a block come block by block with memory carried."""
        kind = WholeEpisodes if block >= self.longest else BlockedEpisodes
        return kind(RolledEpisodes(self, split, seed), batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return correct / max(count, 1)

    def stages(self, split: Split) -> list[Any]:
        """Settings of the worlds from which a split's episodes come, easiest first; all episodes of a group use the same."""
        return [self.config]

    @abstractmethod
    def label(self, token: int) -> str: ...

    @abstractmethod
    def observe(self, engine: Any) -> np.ndarray:
        """Tokens of the current step, [B, n]; -1 stands for no token."""

    @abstractmethod
    def decides(self, engine: Any) -> np.ndarray:
        """[B]: whether the expert's action depends on memory at this step."""

    @abstractmethod
    def target(self, engine: Any, action: np.ndarray) -> np.ndarray:
        """[B]: the token to be predicted at such a step."""

    def act(self, engine: Any) -> np.ndarray:
        """[B]: what the demonstrator does."""
        return engine.optimal_action()

    def start(self, engine: Any) -> None:  # noqa: B027 (most need nothing)
        """Prepare for episodes that are about to be played."""


def demonstrate(twin: Twin, engine: WorldEngine) -> Demonstration:
    """Play the running episodes of an engine to their ends and record them as tokens."""
    parts, targets, scored = [], [], []
    twin.start(engine)
    while not engine.over.all():
        running = ~engine.over
        action = twin.act(engine)
        tokens = np.where(running[:, None], twin.observe(engine), -1)
        decides = running & twin.decides(engine)
        last = tokens.shape[1] - 1 - (tokens[:, ::-1] >= 0).argmax(1)  # the target belongs to the step's last token
        at = np.arange(tokens.shape[1]) == last[:, None]
        parts.append(tokens)
        scored.append(decides[:, None] & at)
        targets.append(np.where(scored[-1], twin.target(engine, action)[:, None], 0))
        engine.step(action)
    return _pack(np.concatenate(parts, 1), np.concatenate(targets, 1), np.concatenate(scored, 1), twin.pad)


def _pack(tokens: np.ndarray, targets: np.ndarray, scored: np.ndarray, pad: int) -> Demonstration:
    """Move the tokens of each row to its front, followed by padding."""
    kept = tokens >= 0
    widths = kept.sum(1)
    order = np.argsort(~kept, axis=1, kind="stable")[:, : int(widths.max())]
    inside = np.arange(order.shape[1]) < widths[:, None]
    tokens, targets, scored = (np.take_along_axis(x, order, 1) for x in (tokens, targets, scored))
    return Demonstration(np.where(inside, tokens, pad), np.where(inside, targets, 0), scored & inside, widths)


def make_dataset(config: CorridorTask | PortalTask | InstructionTask, count: int, *, seed: int = 0) -> Demonstration:
    """Expert episodes 0 .. count - 1 of a grid world, as tokens with targets where memory is needed."""
    if count < 1:
        raise ValueError(f"a dataset needs at least 1 episode, got {count}")
    twin = TWINS[config.kind](config)  # type: ignore[arg-type]
    engine = build_engine(config, count)
    engine.reset(seed)
    return demonstrate(twin, engine)


class RolledEpisodes:
    """Episodes by number, played when they are first asked for."""

    def __init__(self, twin: Twin, split: Split, seed: int) -> None:
        self.twin, self.pad, self.shortest = twin, twin.pad, twin.shortest
        self.count = None if split == "train" else EVAL_EPISODES
        self.key = key_of(split, seed)
        self.seed = seed * len(SPLITS) + SPLITS.index(split)
        self.engines = [build_engine(config, ROLL) for config in twin.stages(split)]
        self.rolled: dict[int, Demonstration] = {}

    def widths(self, numbers: np.ndarray) -> np.ndarray:
        out = np.zeros(np.shape(numbers), np.int64)
        for group, inside in self._groups(numbers):
            out[inside] = self._roll(group).widths[numbers[inside] % ROLL]
        return out

    def batch(self, numbers: np.ndarray, steps: np.ndarray, fresh: np.ndarray) -> Batch:
        """Tokens, targets and the scored positions at [B, T] places."""
        x, y = np.full(numbers.shape, self.pad), np.zeros(numbers.shape, np.int64)
        mask = np.zeros(numbers.shape, bool)
        for group, inside in self._groups(numbers):
            rolled = self._roll(group)
            inside = inside & (steps < rolled.tokens.shape[1])
            at = (numbers[inside] % ROLL, steps[inside])
            x[inside], y[inside], mask[inside] = rolled.tokens[at], rolled.targets[at], rolled.scored[at]
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _groups(self, numbers: np.ndarray) -> list[tuple[int, np.ndarray]]:
        which = np.asarray(numbers) // ROLL
        return [(int(group), which == group) for group in np.unique(which)]

    def _roll(self, group: int) -> Demonstration:
        if group not in self.rolled:
            reached = min(1 + group // STAGE, len(self.engines))
            engine = self.engines[int(mix(self.key + np.uint64(group))[0] % np.uint64(reached))]
            engine.reset(self.seed, environments=np.arange(group * ROLL, (group + 1) * ROLL))
            self.rolled[group] = demonstrate(self.twin, engine)
            for old in sorted(self.rolled)[:-KEEP]:
                del self.rolled[old]
        return self.rolled[group]


class CorridorTwin(Twin):
    """Two tokens per step: what is above and what is below the agent. Scored: the expert's action beside doors."""

    def __init__(self, config: CorridorTask) -> None:
        self.config, self.pad = config, 1 + 3 * config.colours + len(MOVES)
        self.codec = Symbols(self.pad + 1, self.label)
        self.first_action = 1 + 3 * config.colours
        self.longest, self.shortest = 2 * config.max_length, 2 * (config.min_length - (config.colours - 1) // 2)

    def observe(self, engine: Corridor) -> np.ndarray:
        image, half = engine.observe()["image"], engine.view // 2
        cells = image[:, [half - 1, half + 1], half].astype(np.int64)  # [B, 2, 3]
        group = np.select([cells[..., 0] == k for k in (BALL, BOX, DOOR)], [0, 1, 2], -1)
        return np.where(cells[..., 0] == WALL, 0, 1 + group * self.config.colours + cells[..., 1])

    def decides(self, engine: Corridor) -> np.ndarray:
        return 2 * (engine.length - 1 - engine.position) < self.config.colours

    def target(self, engine: Corridor, action: np.ndarray) -> np.ndarray:
        return self.first_action + action

    def label(self, token: int) -> str:
        if token in (0, self.pad):
            return "pad" if token else "wall"
        if token >= self.first_action:
            return f"go {MOVES[token - self.first_action]}"
        kind, colour = divmod(token - 1, self.config.colours)
        return f"{('cue', 'niche', 'door')[kind]} {COLOURS[colour]}"


class PortalTwin(Twin):
    """One token per step: room (where marked), layout of the doors, cell. Scored: left or right in rooms visited before."""

    def __init__(self, config: PortalTask) -> None:
        self.config, self.cells = config, 2 * config.width
        self.first_action = (config.rooms if config.marked else 1) * 2 * self.cells
        self.pad = self.first_action + len(MOVES)
        self.codec = Symbols(self.pad + 1, self.label)
        visits = config.rooms * config.laps + config.rooms * (config.rooms + 1) // 2
        self.shortest = config.steps_per_room * config.rooms * config.laps
        self.longest = config.steps_per_room * visits
        if self.longest > config.max_steps:
            raise ValueError(
                f"the expert may need {self.longest} steps for {config.rooms} rooms and {config.laps} laps, but max_steps is "
                f"{config.max_steps}; raise max_steps"
            )

    def observe(self, engine: Portal) -> np.ndarray:
        room = engine.room if self.config.marked else 0
        layout = engine.left_colour[engine.rows, engine.room]
        return ((room * 2 + layout) * self.cells + engine.y * self.config.width + engine.x)[:, None]

    def decides(self, engine: Portal) -> np.ndarray:
        entrance = (engine.y == 1) & (engine.x == self.config.width // 2)
        return entrance & engine.known[engine.rows, engine.room]

    def target(self, engine: Portal, action: np.ndarray) -> np.ndarray:
        return self.first_action + action

    def label(self, token: int) -> str:
        if token >= self.first_action:
            return "pad" if token == self.pad else f"go {MOVES[token - self.first_action]}"
        place, at = divmod(token, self.cells)
        room, layout = divmod(place, 2)
        y, x = divmod(at, self.config.width)
        doors = ("red left", "blue left")[layout]
        return f"room {room + 1 if self.config.marked else '?'} {doors} cell {x},{y}"


class InstructionTwin(Twin):
    """The words of every sentence. After the talk all mentioned places are visited. Scored: the act there, or "walk on"."""

    def __init__(self, config: InstructionTask) -> None:
        self.config = config
        self.walk_on = len(WORDS)
        self.first_act = self.walk_on + 1
        self.pad = self.first_act + len(VERBS) * len(OBJECTS)
        self.codec = Symbols(self.pad + 1, self.label)
        far = 2 * (config.size - 1) + 2
        self.longest = LENGTH * (config.talk + config.instructions * far + 1)
        self.shortest = 2 * (config.least_talk or config.talk)

    def stages(self, split: Split) -> list[InstructionTask]:
        """In training, talks of doubling lengths from the shortest to the full one; for evaluation, the full talk only."""
        least, talk = self.config.least_talk, self.config.talk
        if split != "train" or not least:
            return [self.config]
        lengths = [n for n in (least << k for k in range(32)) if n < talk]
        return [replace(self.config, talk=n, least_talk=0) for n in [*lengths, talk]]

    def start(self, engine: Instruction) -> None:
        self.passed = np.zeros_like(engine.done)  # [B, M]: cancelled instructions whose place has been visited

    def act(self, engine: Instruction) -> np.ndarray:
        """Visit the places of all instructions, cancelled ones too, from the last one told to the first, which is never
        cancelled."""
        at_place = engine.goal == engine.place[:, None]
        self.passed |= at_place & (engine.change == 1) & ~engine.listening[:, None]
        here = at_place & engine.still_open()
        left = ~(engine.done | self.passed)[:, ::-1]
        following = (left & (np.cumsum(left, 1) == 1))[:, ::-1]  # [B, M], one True a row
        move = engine.move_towards((engine.goal * following).sum(1))
        act = 4 + (here * engine.final_act).sum(1)
        return np.where(engine.listening, LEFT, np.where(here.any(1), act, move))

    def observe(self, engine: Instruction) -> np.ndarray:
        words = engine.sentence()
        return np.where(words == 0, -1, words)

    def decides(self, engine: Instruction) -> np.ndarray:
        told = (engine.goal == engine.place[:, None]).any(1)
        return told & ~engine.listening & (engine.feedback == 0) & (engine.steps > engine.config.talk)

    def target(self, engine: Instruction, action: np.ndarray) -> np.ndarray:
        return np.where(action < 4, self.walk_on, self.first_act + action - 4)

    def label(self, token: int) -> str:
        if token < self.walk_on:
            return WORDS[token] or "nothing"
        if token in (self.walk_on, self.pad):
            return "walk on" if token == self.walk_on else "pad"
        verb, thing = divmod(token - self.first_act, len(OBJECTS))
        return f"{VERBS[verb]} {OBJECTS[thing]}"


TWINS: dict[str, type[Twin]] = {"corridor": CorridorTwin, "portal": PortalTwin, "instruction": InstructionTwin}
