"""The base of the grid worlds: many environments side by side, stepped by array operations alone.

Every draw is a hash of (seed, environment, episode, purpose, place), so an episode depends on nothing else: not on the batch,
the backend or the device. It is fast because it uses few and large array operations: episodes are drawn only for the rows that
begin one, and views of which there are few are looked up in tables.

Observations use MiniGrid's encoding: each cell is (type, colour, state). The view is a square centred on the agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from expire_span.tasks.hashing import mix_signed

from .arrays import Array, Arrays, Backend

UNSEEN, EMPTY, WALL, FLOOR, DOOR, KEY, BALL, BOX, GOAL = range(9)
"""Cell types of MiniGrid, by their numbers."""
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Colours of MiniGrid, by their numbers."""
GREY = 5
CLOSED = 1
"""State of a door that is shut."""
SAVED = ("keys", "episodes", "steps", "over", "success")
"""Arrays of every world that a snapshot holds."""
LEFT, RIGHT, UP, DOWN = range(4)
MOVES = ("left", "right", "up", "down")


@dataclass
class WorldStep:
    """What one step of every environment returns."""

    observation: dict[str, Array]
    reward: Array
    """[B], float32."""
    terminated: Array
    """[B], bool: the episode has ended by its own rules."""
    truncated: Array
    """[B], bool: the episode has run into its step limit."""


class WorldEngine(ABC):
    """`num_envs` environments side by side (B). One whose episode is over does not move, with reward 0, until `begin` or
    `reset`.

    Two kinds of arrays describe the running episodes: facts, which are drawn when an episode begins and do not change until its
    end, and state, which steps change. Facts follow from (seed, environment, episode), so only state has to be saved.
    """

    name: ClassVar[str]
    state: ClassVar[tuple[str, ...]]
    """Names of the arrays that a world's steps change, beside those of `SAVED`."""
    num_actions: int
    text_length: int = 0
    """Number of word ids of a sentence (S); 0 where observations have no text."""
    keys: Array
    """[B]: hash of seed and environment."""
    episodes: Array
    """[B]: number of the running episode."""

    def __init__(self, config: Any, num_envs: int, *, backend: Backend = "numpy", device: str = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.config, self.num_envs, self.view = config, num_envs, config.view
        self.arrays = Arrays(backend, device)
        self.rows = self.arrays.arange(num_envs)
        self.offsets = self.arrays.arange(self.view)[None, :] - self.view // 2  # [1, V], relative to the agent
        self.steps = self.arrays.zeros(num_envs)
        self.over = self.arrays.falses(num_envs)
        self.success = self.arrays.falses(num_envs)
        self._ahead: dict[str, Array] | None = None  # facts of every row's next episode; see begin_ended
        self._ahead_age = 0  # steps since they were drawn
        self._build_tables()
        self.reset(seed=0)

    # Episodes

    def reset(
        self, seed: int | None = None, *, seeds: Sequence[int] | None = None, environments: Any = None
    ) -> dict[str, Array]:
        """Begin an episode in every environment: episode 0 of a seed (or of one seed each), else the next one of each."""
        if seed is None and seeds is None:
            self.begin(self.rows >= 0)
            return self.observe()
        numbers = self.rows if environments is None else self.arrays.integers(environments)
        given = self.arrays.integers([fold_seed(s) for s in seeds]) if seeds is not None else self.rows * 0
        base = given if seeds is not None else given + fold_seed(seed or 0)
        self.keys = mix_signed(mix_signed(base) + numbers)
        self.episodes = self.rows * 0 - 1
        self.begin(self.rows >= 0)
        return self.observe()

    def begin(self, rows: Array) -> None:
        """Begin the next episode in the rows that are True in `rows` [B]; the others continue.

        On the CPU only these rows are drawn, since in a large batch a few episodes end at nearly every step.
        """
        positions = self.arrays.positions(rows)
        if positions is not None and len(positions) == 0:
            return
        self.episodes = self.episodes + rows
        self._ahead = None
        self._begin(rows, positions, self._draw_facts(self._episode_keys(positions)))

    def begin_ended(self) -> None:
        """Begin the next episode in the rows whose episode is over: the same as `begin(self.over)`, and faster on a GPU.

        There, episodes would be drawn for all rows at every step. Instead, the next episode of every row is drawn ahead, and
        drawn again after as many steps as the shortest episode has: until then, no row can end twice.
        """
        if self.arrays.positions(self.over) is not None:
            return self.begin(self.over)
        if self._ahead is None or self._ahead_age >= self.shortest:
            self._ahead, self._ahead_age = self._draw_facts(mix_signed(self.keys ^ mix_signed(self.episodes + 1))), 0
        self.episodes = self.episodes + self.over
        self._begin(self.over, None, self._ahead)

    def _begin(self, rows: Array, positions: Array | None, facts: dict[str, Array]) -> None:
        """Start the episodes with these facts, of the rows at `positions` or, where that is None, of all rows."""
        self.steps = self.arrays.where(rows, 0, self.steps)
        self.over, self.success = self.over & ~rows, self.success & ~rows
        for name, new in {**facts, **self._first_state(facts)}.items():
            old = getattr(self, name, None)
            setattr(self, name, new if old is None else self.arrays.merge(old, new, rows, positions))

    def _episode_keys(self, positions: Array | None = None) -> Array:
        """Hash of seed, environment and episode, of some rows or of all."""
        keys, episodes = self.keys, self.episodes
        if positions is not None and len(positions) < self.num_envs:
            keys, episodes = keys[positions], episodes[positions]
        return mix_signed(keys ^ mix_signed(episodes))

    def snapshot(self) -> dict[str, Array]:
        """The arrays that `restore` needs."""
        return {name: getattr(self, name) for name in (*SAVED, *self.state)}

    def restore(self, saved: dict[str, Array]) -> None:
        """Return to a snapshot. Facts that follow from the episodes' numbers are drawn again; other names are ignored."""
        self._ahead = None
        for name in (*SAVED, *self.state):
            setattr(self, name, saved[name])
        for name, values in self._draw_facts(self._episode_keys()).items():
            setattr(self, name, values)

    # Steps

    def step(self, actions: Any) -> WorldStep:
        """Move every environment that is not over by one step."""
        arrays = self.arrays
        actions = arrays.integers(actions)
        self._check(actions)
        self._ahead_age += 1
        running = ~self.over
        reward, ended, success = self._advance(actions, running)
        self.steps = self.steps + running
        terminated = running & ended
        truncated = running & ~ended & (self.steps >= self._limits())
        self.success = self.success | (terminated & success)
        self.over = self.over | terminated | truncated
        reward = arrays.cast(arrays.where(running, reward, 0.0), "float32")
        return WorldStep(self.observe(), reward, terminated, truncated)

    def _check(self, actions: Array) -> None:
        if tuple(actions.shape) != (self.num_envs,):
            raise ValueError(f"actions must have shape ({self.num_envs},), got {tuple(actions.shape)}")
        if self.arrays.device == "cpu":  # on a GPU the check would wait for the device at every step
            wrong = (actions < 0) | (actions >= self.num_actions)
            if bool(wrong.any()):
                bad = int(actions[wrong][0])
                raise ValueError(f"an action of {self.name} lies in 0..{self.num_actions - 1}, got {bad}")

    def info(self) -> dict[str, Array]:
        """Facts that the agent must not see: success, the expert's action and steps, the fact that this observation shows and
        until when it is needed."""
        fact, until = self.needed()
        return {
            "success": self.success,
            "optimal_action": self.optimal_action(),
            "oracle_steps": self.oracle_steps(),
            "needed_until": self.arrays.where(fact >= 0, until, self.steps),
            "fact": fact,
        }

    # What each world defines

    @property
    def shortest(self) -> int:
        """Steps that every episode has at least."""
        return 1

    def _build_tables(self) -> None:  # noqa: B027 (a world may need none)
        """Tables that depend on the settings alone."""

    @abstractmethod
    def _draw_facts(self, keys: Array) -> dict[str, Array]:
        """Draw the facts of the episodes with these keys [n]: a dictionary from attribute names to arrays [n, ...]."""

    @abstractmethod
    def _first_state(self, facts: dict[str, Array]) -> dict[str, Array]:
        """The arrays of `state` at the beginning of episodes with these facts."""

    @abstractmethod
    def _advance(self, actions: Array, running: Array) -> tuple[Array, Array, Array]:
        """Change the state of the running rows; returns reward, whether the episode ended, and whether it was a success."""

    @abstractmethod
    def _limits(self) -> Array | int:
        """Steps after which an episode is truncated."""

    @abstractmethod
    def observe(self) -> dict[str, Array]:
        """`image` [B, V, V, 3] uint8, and for some worlds `text` [B, S] int32."""

    @abstractmethod
    def optimal_action(self) -> Array:
        """[B]: what the expert, who remembers everything that was shown, does now."""

    @abstractmethod
    def oracle_steps(self) -> Array:
        """[B]: steps of this whole episode for the expert."""

    @abstractmethod
    def needed(self) -> tuple[Array, Array]:
        """[B] each: the fact that this observation shows (-1 for none), and the last step at which that fact is needed.

        The last step assumes that the expert acts from now on. Where several observations show the same fact, keeping any one
        of them is enough.
        """

    @abstractmethod
    def describe_hidden(self, row: int) -> str:
        """Hidden state of one environment in words, for the debug rendering."""

    # Images

    def paint(self, cells: Array) -> Array:
        """Codes of `cell` [..., V, V] as images [..., V, V, 3] uint8: the three lower bytes of each code."""
        parts = self.arrays.bytes_of(cells)
        return parts[..., :3].copy() if self.arrays.is_numpy else parts[..., :3].contiguous()


def cell(kind: Any, colour: Any = 0, state: Any = 0) -> Any:
    """Type, colour and state of a cell as one number; works on numbers and on arrays."""
    return kind + (colour << 8) + (state << 16)


def fold_seed(seed: int) -> int:
    """Any Python integer as a signed 64-bit one."""
    return (int(seed) + 2**63) % 2**64 - 2**63
