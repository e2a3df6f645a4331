"""Endless T-Maze: a corridor with a cue at its start and a turn at its end, then the next one, in the same episode.

A 1 x L corridor. The cue, a ball in the wall above cell 0, is red where up is the right turn and green where down is. At the
last cell the agent can turn up or down, both of which lead to the start of the next corridor, whose length and cue are drawn
anew: what the last cue said is worth nothing from there on. An episode is over after `mazes` corridors.

Actions: left, right, up, down. Reward: +1 for a right turn, -1 for a wrong one, -0.01 for every other step. Success is an
episode without a wrong turn. Truncated after `mazes` (2 max_length + 10) steps.
"""

from __future__ import annotations

from expire_span.settings.tasks import TMazeTask
from expire_span.tasks.hashing import mix_signed

from .arrays import Array, below
from .engine import BALL, COLOURS, EMPTY, GREY, RIGHT, UP, WALL, WorldEngine, cell

LENGTH, CUE = range(2)
"""Purposes of draws."""
STEP_COST = 0.01


class TMaze(WorldEngine):
    name = "tmaze"
    state = ("position", "maze", "errors")
    num_actions = 4
    config: TMazeTask
    position: Array
    """[B]: the agent's cell."""
    maze: Array
    """[B]: number of the current corridor."""
    errors: Array
    """[B]: number of wrong turns so far."""
    lengths: Array
    """[B, M]: cells of each corridor."""
    cues: Array
    """[B, M]: the right turn of each corridor, 0 up and 1 down, which is also the cue's colour."""

    def _build_tables(self) -> None:
        self.numbers = self.arrays.arange(self.config.mazes)[None, :]
        self.first_mazes = self.rows * self.config.mazes  # where a row's corridors begin in flat arrays
        self.changes = self.arrays.constant([-1, 1, 0, 0])  # how each action changes the agent's cell

    def _draw_facts(self, keys: Array) -> dict[str, Array]:
        purposes = mix_signed(keys + self.arrays.arange(2)[:, None])  # [2, n]
        draws = mix_signed(purposes[:, :, None] + self.numbers)  # [2, n, M]
        lengths = self.config.min_length + below(draws[LENGTH], self.config.max_length - self.config.min_length + 1)
        return {"lengths": lengths, "cues": below(draws[CUE], 2)}

    def _first_state(self, facts: dict[str, Array]) -> dict[str, Array]:
        zero = facts["cues"][:, 0] * 0
        return {"position": zero, "maze": zero, "errors": zero}

    def _here(self, of_mazes: Array) -> Array:
        """The entry of the current corridor, [B], in an array [B, M]; once all are passed, that of the last."""
        return of_mazes.reshape(-1)[self.first_mazes + self.arrays.clamp(self.maze, self.config.mazes - 1)]

    @property
    def shortest(self) -> int:
        return self.config.mazes * self.config.min_length

    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        where, last = self.arrays.where, self._here(self.lengths) - 1
        turned = running & (self.position == last) & (actions >= UP)
        right = turned & (actions - UP == self._here(self.cues))
        moved = self.arrays.clamp(self.position + self.changes[actions], last)
        self.position = where(turned, 0, where(running, moved, self.position))
        self.maze = self.maze + turned
        self.errors = self.errors + (turned & ~right)
        done = self.maze == self.config.mazes
        return where(turned, where(right, 1.0, -1.0), -STEP_COST), done, done & (self.errors == 0)

    def _limits(self) -> int:
        return self.config.mazes * (2 * self.config.max_length + 10)

    def observe(self) -> dict[str, Array]:
        where, length = self.arrays.where, self._here(self.lengths)[:, None]
        columns = self.position[:, None] + self.offsets  # [B, V]
        inside, wall = (columns >= 0) & (columns < length), cell(WALL, GREY)
        beside = where(columns == length - 1, EMPTY, wall)
        cells = self.arrays.zeros(self.num_envs, 3, self.view, kind="int32")
        cells[:, 0] = where(columns == 0, cell(BALL, self._here(self.cues))[:, None], beside)
        cells[:, 1] = where(inside, EMPTY, wall)
        cells[:, 2] = beside
        # Zero means unseen: the agent sees only the corridor and its walls.
        image = self.arrays.zeros(self.num_envs, self.view, self.view, 3, kind="uint8")
        half = self.view // 2
        image[:, half - 1 : half + 2] = self.arrays.bytes_of(cells)[..., :3]
        return {"image": image}

    def optimal_action(self) -> Array:
        at_end = self.position == self._here(self.lengths) - 1
        return self.arrays.where(at_end, UP + self._here(self.cues), RIGHT)

    def oracle_steps(self) -> Array:
        return self.lengths.sum(-1)

    def needed(self) -> tuple[Array, Array]:
        until = self.steps + self._here(self.lengths) - 1 - self.position
        return self.arrays.where(self.position <= self.view // 2, self.maze, -1), until

    def describe_hidden(self, row: int) -> str:
        at, length, turn, maze = (
            int(x[row]) for x in (self.position, self._here(self.lengths), self._here(self.cues), self.maze)
        )
        way = ("up", "down")[turn]
        return f"corridor {maze + 1} of {self.config.mazes}, cell {at + 1} of {length}, {COLOURS[turn]}: {way} is right"
