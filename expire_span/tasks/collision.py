"""Object collision: two coloured particles move on a grid; where did colours A and B last collide?

Re-implemented from the published description. Each frame is eight tokens: row, column and colour of both particles, then the
two colours of the question. The target at the eighth token is the quadrant of that pair's latest collision; questions about
pairs that have never collided are not scored. Most answers lie thousands of tokens back, and nearly all frames can be
forgotten.

Every draw is a hash of (seed, split, row, frame, purpose). All rows are simulated side by side, many frames at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.disk.files import read_json
from expire_span.settings.tasks import CollisionTask

from .contract import Batch, Score, Split, Symbols
from .episodes import below, chance, key_of
from .hashing import mix
from .text import check_rows

FRAME = 8
"""Tokens of a frame."""
HINT = 5
"""The token of a frame at which both particles are known: where `hints` ask for the frame's own collision."""
QUADRANTS = ("top left", "top right", "bottom left", "bottom right")
ATTEMPTS = 8
"""Number of velocities drawn at once where one must be drawn again."""
ENOUGH_FRAMES = 16_000_000
"""Frames to save for a training of minutes; with much fewer, a model learns them by heart."""
RECIPE_FRAMES = {"collision-dense": 4_000_000, "collision-sparse": 4_000_000, "collision-long": 96_000_000}
"""Frames with which the recipes of these folders were measured, where they are not ENOUGH_FRAMES."""
GAME = "game.json"
"""The file beside saved simulations that says how they were made."""
START, SPEED, COLOUR, ASK, MEET = range(5)
"""Purposes of draws."""


@dataclass
class Frames:
    """Frames of every row, time first."""

    cells: np.ndarray
    """[F, B, 2, 2]: row and column of both particles."""
    colours: np.ndarray
    """[F, B, 2]."""
    asked: np.ndarray
    """[F, B, 2]: colours of the question."""
    label: np.ndarray
    """[F, B]: 0 where the pair has never collided, else 1 + the quadrant of its latest collision."""
    age: np.ndarray
    """[F, B]: frames since that collision; -1 where there was none."""


class Simulation:
    """Independent simulations without end, one per row."""

    def __init__(self, config: CollisionTask, rows: int, *, key: np.ndarray) -> None:
        self.config, self.rows = config, rows
        shares = np.array(config.meet_probs or (config.meet_prob,))
        self.meet_prob = shares[np.arange(rows) * len(shares) // rows]  # [B]: equal parts of the rows have one each
        self.keys = mix(key + np.arange(rows, dtype=np.uint64))  # [B]
        self.frame = 0
        pairs = config.colours**2
        draws = self._draws(START, np.arange(4)).astype(np.uint64)  # [B, 4]
        self.position = (_unit(draws) * (config.size - 1)).reshape(rows, 2, 2)
        self.velocity = np.full(
            (rows, 2, 2), np.inf
        )  # an infinite velocity leaves the field, so the first move draws one
        self.colour = below(self._draws(COLOUR, np.arange(2)), config.colours)  # [B, 2]
        self.cell = np.zeros((rows, pairs), np.int64)  # quadrant of each pair's latest collision
        self.when = np.full((rows, pairs), -1)  # and its frame
        self.latest = np.full(rows, -1)  # the pair that collided last

    def run(self, frames: int) -> Frames:
        """Simulate the next frames."""
        at = np.arange(self.frame + 1, self.frame + 1 + frames)
        positions = np.stack([self._move(int(frame)) for frame in at])
        cells = np.rint(positions).astype(np.int64)
        if self.meet_prob.any():
            meets = chance(self._draws(MEET, at).T, self.meet_prob)  # [F, B]
            cells[:, :, 1] = np.where(meets[..., None], cells[:, :, 0], cells[:, :, 1])
        colours = self._colours(at)
        out = self._ask(at, cells, colours)
        self.frame += frames
        return out

    def _move(self, frame: int) -> np.ndarray:
        """Move every particle by one step; a velocity that would leave the field is drawn again until it does not."""
        moved = self.position + self.velocity
        row, particle = np.nonzero(self._leaves(moved))
        attempt = 0
        while len(row):
            speeds = self._speeds(row, particle, frame, np.arange(attempt, attempt + ATTEMPTS))  # [n, A, 2]
            tried = self.position[row, particle][:, None] + speeds
            inside = ~self._leaves(tried)
            # Of the attempts that stay inside, the first one counts.
            first, every = inside.argmax(1), np.arange(len(row))
            self.velocity[row, particle], moved[row, particle] = speeds[every, first], tried[every, first]
            left = ~inside.any(1)
            row, particle, attempt = row[left], particle[left], attempt + ATTEMPTS
        self.position = moved
        return moved

    def _leaves(self, place: np.ndarray) -> np.ndarray:
        """Whether places [..., 2] lie outside the field or on its edge."""
        out = (place <= 0) | (place >= self.config.size - 1)
        return out[..., 0] | out[..., 1]

    def _speeds(self, row: np.ndarray, particle: np.ndarray, frame: int, attempts: np.ndarray) -> np.ndarray:
        """Normal velocities [n, A, 2] by the Box-Muller transform."""
        place = np.uint64(frame * 2) + particle.astype(np.uint64)
        first = mix(mix(mix(self.keys[row] + np.uint64(SPEED)) + place)[:, None] + attempts.astype(np.uint64))
        radius = np.sqrt(-2 * np.log1p(-_unit(first))) * self.config.speed
        angle = 2 * np.pi * _unit(mix(first + np.uint64(1)))
        return np.stack([radius * np.cos(angle), radius * np.sin(angle)], -1)

    def _colours(self, at: np.ndarray) -> np.ndarray:
        """Colours of all frames [F, B, 2]: at each frame a particle draws a new colour with a small probability."""
        places = (at[:, None] * 2 + np.arange(2)).reshape(-1)
        draws = self._draws(COLOUR, places).reshape(self.rows, len(at), 2).swapaxes(0, 1)
        new = chance(draws, self.config.colour_prob)
        fresh = below(draws << np.uint64(32), self.config.colours)
        index = np.where(new, np.arange(len(at))[:, None, None], -1)
        last = np.maximum.accumulate(index, 0)
        held = np.take_along_axis(fresh, np.maximum(last, 0), 0)
        out = np.where(last >= 0, held, self.colour)
        self.colour = out[-1]
        return out

    def _ask(self, at: np.ndarray, cells: np.ndarray, colours: np.ndarray) -> Frames:
        """Record the collisions of every frame and draw its question."""
        config, rows = self.config, np.arange(self.rows)
        met = (cells[:, :, 0] == cells[:, :, 1]).all(-1)  # [F, B]
        middle = config.size // 2
        quadrant = 2 * (cells[:, :, 0, 0] >= middle) + (cells[:, :, 0, 1] >= middle)
        pair = colours[..., 0] * config.colours + colours[..., 1]
        draws = self._draws(ASK, at).T  # [F, B]
        uniform = below(draws << np.uint64(32), config.colours**2)
        repeat = chance(draws, config.latest_prob)
        asked, label, age = (np.zeros(met.shape, np.int64) for _ in range(3))
        now = config.easy == "now"
        for n, frame in enumerate(at):
            hit = np.flatnonzero(met[n])
            self.cell[hit, pair[n, hit]], self.when[hit, pair[n, hit]] = quadrant[n, hit], frame
            self.latest[hit] = pair[n, hit]
            asked[n] = np.where(repeat[n] & (self.latest >= 0), pair[n] if now else self.latest, uniform[n])
            when = self.when[rows, asked[n]]
            label[n] = np.where(when >= 0, 1 + self.cell[rows, asked[n]], 0)
            age[n] = np.where(when >= 0, frame - when, -1)
        return Frames(cells, colours, np.stack(np.divmod(asked, config.colours), -1), label, age)

    def _draws(self, purpose: int, places: np.ndarray) -> np.ndarray:
        """[B, n] draws of all rows for one purpose at n places."""
        return mix(mix(self.keys + np.uint64(purpose))[:, None] + places.astype(np.uint64))

    def state_dict(self) -> dict[str, Any]:
        arrays = ("position", "velocity", "colour", "cell", "when", "latest")
        return {"frame": self.frame, **{name: getattr(self, name).tolist() for name in arrays}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_rows(len(state["latest"]), self.rows)
        for name, value in state.items():
            setattr(self, name, value if name == "frame" else np.array(value))


def _unit(draws: np.ndarray) -> np.ndarray:
    """Uniform in [0, 1) from the upper 53 bits."""
    return (draws >> np.uint64(11)).astype(np.float64) / 2.0**53


class Collision:
    """Only the last token of each frame is scored, and only where the pair has collided before."""

    score = Score("error", higher_is_better=False)
    longest = 128 * FRAME

    def __init__(self, config: CollisionTask) -> None:
        self.config = config
        self.first_colour = 2 * config.size
        self.first_asked = self.first_colour + config.colours
        self.first_answer = self.first_asked + config.colours
        self.no_collision = self.first_answer + len(QUADRANTS)
        self.codec = Symbols(self.no_collision + 1, self.label)

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> CollisionRows | SavedRows:
        """Every row is a simulation of its own, or a contiguous part of a saved one."""
        if block % FRAME:
            raise ValueError(f"a block of collision must hold whole frames of {FRAME} tokens, got block {block}")
        if self.config.path:
            return SavedRows(self, split, batch=batch, block=block)
        return CollisionRows(self, split, batch=batch, block=block, seed=seed)

    def config_of(self, split: Split) -> CollisionTask:
        """The settings of a split: aids for learning (hints, forced meetings) are used in training only."""
        return self.config if split == "train" else replace(self.config, meet_prob=0.0, meet_probs=(), hints=False)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return 1 - correct / max(count, 1)

    def to_tokens(self, frames: Frames) -> np.ndarray:
        """[B, F * 8] tokens."""
        size = self.config.size
        parts = []
        for n in range(2):
            row, column = frames.cells[:, :, n, 0], frames.cells[:, :, n, 1] + size
            parts += [row, column, frames.colours[:, :, n] + self.first_colour]
        parts += [frames.asked[..., 0] + self.first_asked, frames.asked[..., 1] + self.first_asked]
        return np.stack(parts, -1).swapaxes(0, 1).reshape(frames.label.shape[1], -1)

    def to_batch(self, tokens: np.ndarray, labels: np.ndarray, fresh: np.ndarray, *, hints: bool = False) -> Batch:
        """Tokens [B, T] and labels [B, T / 8] as a batch; with `hints`, each frame's own collision is a further target."""
        y, mask = np.zeros(tokens.shape, np.int64), np.zeros(tokens.shape, bool)
        mask[:, FRAME - 1 :: FRAME] = labels > 0
        y[:, FRAME - 1 :: FRAME] = np.where(labels > 0, self.first_answer + labels - 1, 0)
        if hints:
            mask[:, HINT::FRAME], y[:, HINT::FRAME] = True, self._collisions(tokens)
        tokens = np.ascontiguousarray(tokens, np.int64)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _collisions(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T / 8]: the answer token of each frame's own collision, or the token that says there is none."""
        row, column, size = tokens[:, 0::FRAME], tokens[:, 1::FRAME], self.config.size
        met = (row == tokens[:, 3::FRAME]) & (column == tokens[:, 4::FRAME])
        quadrant = 2 * (row >= size // 2) + (column - size >= size // 2)
        return np.where(met, self.first_answer + quadrant, self.no_collision)

    def label(self, token: int) -> str:
        size = self.config.size
        if token == self.no_collision:
            return "no collision"
        if token >= self.first_answer:
            return f"answer {QUADRANTS[token - self.first_answer]}"
        if token >= self.first_asked:
            return f"asked colour {token - self.first_asked}"
        if token >= self.first_colour:
            return f"colour {token - self.first_colour}"
        return f"row {token}" if token < size else f"column {token - size}"


class CollisionRows:
    """Simulations that never end (train) or end after `eval_frames` frames in all (valid, test)."""

    def __init__(self, task: Collision, split: Split, *, batch: int, block: int, seed: int) -> None:
        self.task, self.frames, self.hints = task, block // FRAME, task.config.hints and split == "train"
        self.simulation = Simulation(task.config_of(split), batch, key=key_of(split, seed))
        self.limit = None if split == "train" else -(-task.config.eval_frames // batch)

    def __iter__(self) -> CollisionRows:
        return self

    def __next__(self) -> Batch:
        start = self.simulation.frame
        count = self.frames if self.limit is None else min(self.frames, self.limit - start)
        if count <= 0:
            raise StopIteration
        frames = self.simulation.run(count)
        tokens, fresh = self.task.to_tokens(frames), np.full(self.simulation.rows, start == 0)
        return self.task.to_batch(tokens, frames.label.T, fresh, hints=self.hints)

    def state_dict(self) -> dict[str, Any]:
        return self.simulation.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.simulation.load_state_dict(state)


def _command_for(config: CollisionTask) -> str:
    """The command that makes the saved simulations of a task."""
    folder = Path(config.path)
    shares = config.meet_probs or (config.meet_prob,)
    options = f" --meet-prob {' '.join(f'{share:g}' for share in shares)}" if any(shares) else ""
    options += "" if config.easy == "latest" else f" --easy {config.easy}"
    return f"expire-span data collision{options} --frames {RECIPE_FRAMES.get(folder.name, ENOUGH_FRAMES)} --to {folder}"


def read_game(folder: Path) -> dict[str, Any] | None:
    """How the simulations in a folder were made; None where nothing says so. Old folders have the usual easy questions."""
    note = folder / GAME
    return {"easy": "latest", **read_json(note)} if note.exists() else None


def _check_kind(config: CollisionTask) -> None:
    """Refuse simulations whose easy questions are of the other kind."""
    found = (read_game(Path(config.path)) or {"easy": "latest"})["easy"]
    if found != config.easy:
        other = replace(config, path=f"{config.path}-{config.easy}")
        raise ValueError(
            f"{config.path} was made with --easy {found}, and --task.easy is {config.easy}; set --task.easy {found}, or give "
            f"another --task.path, made with: {_command_for(other)}"
        )


class SavedRows:
    """One saved simulation per split, cut into contiguous rows; in training each row starts again after its end."""

    def __init__(self, task: Collision, split: Split, *, batch: int, block: int) -> None:
        path = Path(task.config.path) / f"{split}.npy"
        if not path.is_file():
            raise ValueError(f"{path} is missing; make it with: {_command_for(task.config)}")
        _check_kind(task.config)
        data = np.load(path, mmap_mode="r", allow_pickle=False)  # [frames, 9]: eight tokens, then the label
        if len(data) < batch:
            raise ValueError(
                f"{path} holds {len(data)} frames, but {batch} rows need at least one each; take a smaller batch"
            )
        self.task, self.data, self.frames, self.ends = task, data, block // FRAME, split != "train"
        self.length, self.batch, self.offset = len(data) // batch, batch, 0
        self.hints = task.config.hints and split == "train"

    def __iter__(self) -> SavedRows:
        return self

    def __next__(self) -> Batch:
        if self.offset >= self.length:
            if self.ends:
                raise StopIteration
            self.offset = 0
        count = min(self.frames, self.length - self.offset)
        starts = np.arange(self.batch) * self.length + self.offset
        rows = np.stack([self.data[start : start + count] for start in starts])  # [B, F, 9]
        fresh = np.full(self.batch, self.offset == 0)
        self.offset += count
        tokens = rows[..., :FRAME].reshape(self.batch, -1)
        return self.task.to_batch(tokens, rows[..., FRAME], fresh, hints=self.hints)

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset, "rows": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_rows(state["rows"], self.batch)
        self.offset = state["offset"]
