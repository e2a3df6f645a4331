"""The base of the grid worlds: many environments side by side, stepped by array operations alone.

Every draw is a hash of (seed, environment, episode, purpose, place), so an episode depends on nothing else: not on the batch it
runs in, not on the backend, not on the device. Nothing random is stored.

Observations use MiniGrid's encoding: each cell is (type, colour, state). The view is a square centred on the agent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .arrays import Array, Arrays, Backend, mix

UNSEEN, EMPTY, WALL, FLOOR, DOOR, KEY, BALL, BOX, GOAL = range(9)
"""Cell types of MiniGrid, by their numbers."""
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")
"""Colours of MiniGrid, by their numbers."""
GREY = 5
CLOSED = 1
"""State of a door that is shut."""
LEFT, RIGHT, UP, DOWN = range(4)
MOVES = ("left", "right", "up", "down")


@dataclass
class Step:
    """What one step of every environment gives."""

    observation: dict[str, Array]
    reward: Array
    """[B], float32."""
    terminated: Array
    """[B], bool: the episode has ended by its own rules."""
    truncated: Array
    """[B], bool: the episode has run into its step limit."""


class Engine(ABC):
    """`num_envs` environments side by side. Those that are over stand still, with reward 0, until they are begun anew."""

    name: ClassVar[str]
    num_actions: int
    text_length: int = 0
    """Word ids of a sentence; 0 where observations have no text."""

    def __init__(self, config: Any, num_envs: int, *, backend: Backend = "numpy", device: str = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        self.config, self.num_envs, self.view = config, num_envs, config.view
        self.arrays = Arrays(backend, device)
        self.rows = self.arrays.arange(num_envs)
        offsets = self.arrays.arange(self.view) - self.view // 2
        self.offsets = offsets[None, :]  # [1, V]: columns or rows of the view, relative to the agent
        self.steps = self.arrays.zeros(num_envs)
        self.over = self.arrays.falses(num_envs)
        self.success = self.arrays.falses(num_envs)
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
        self.keys = mix(mix(base) + numbers)
        self.episodes = self.rows * 0 - 1
        self.begin(self.rows >= 0)
        return self.observe()

    def begin(self, rows: Array) -> None:
        """Begin the next episode in the rows [B] that are True; the others go on."""
        where = self.arrays.where
        self.episodes = where(rows, self.episodes + 1, self.episodes)
        self.episode_keys = mix(self.keys ^ mix(self.episodes))
        self.steps = where(rows, 0, self.steps)
        self.over, self.success = self.over & ~rows, self.success & ~rows
        self._begin(rows)

    def draw(self, purpose: int, places: Array | int = 0) -> Array:
        """Hashed draws of the running episodes for one purpose: [B], or [B, ...] for places of that shape."""
        key = mix(self.episode_keys + purpose)
        if isinstance(places, int):
            return mix(key + places)
        return mix(key.reshape((-1,) + (1,) * (len(places.shape) - 1)) + places)

    # Steps

    def step(self, actions: Any) -> Step:
        """Move every environment that is not over by one step."""
        arrays = self.arrays
        actions = arrays.integers(actions)
        self._check(actions)
        running = ~self.over
        reward, ended, success = self._advance(actions, running)
        self.steps = self.steps + running
        terminated = running & ended
        truncated = running & ~ended & (self.steps >= self._limits())
        self.success = self.success | (terminated & success)
        self.over = self.over | terminated | truncated
        reward = arrays.cast(arrays.where(running, reward, 0.0), "float32")
        return Step(self.observe(), reward, terminated, truncated)

    def _check(self, actions: Array) -> None:
        if tuple(actions.shape) != (self.num_envs,):
            raise ValueError(f"actions must have shape ({self.num_envs},), got {tuple(actions.shape)}")
        if self.arrays.device == "cpu":  # on a GPU the check would wait for the device at every step
            wrong = (actions < 0) | (actions >= self.num_actions)
            if bool(wrong.any()):
                bad = int(actions[wrong][0])
                raise ValueError(f"an action of {self.name} lies in 0..{self.num_actions - 1}, got {bad}")

    def info(self) -> dict[str, Array]:
        """What training must not see: success, the expert's action and steps, and how long this observation is useful."""
        fact, until = self.needed()
        return {
            "success": self.success,
            "optimal_action": self.optimal_action(),
            "oracle_steps": self.oracle_steps(),
            "needed_until": self.arrays.where(fact >= 0, until, self.steps),
            "fact": fact,
        }

    # What each world defines

    @abstractmethod
    def _begin(self, rows: Array) -> None:
        """Derive what the new episodes need from their draws."""

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
        """[B] each: the fact that this observation shows (-1 for none), and the last step at which it is of use.

        The last step assumes that the expert acts from now on. Where several observations show one fact, keeping any of
        them is enough.
        """

    @abstractmethod
    def describe_hidden(self, row: int) -> str:
        """Hidden state of one environment in words, for the debug rendering."""

    # Images

    def paint(self, cells: Array) -> Array:
        """Codes of `cell` [B, V, V] as an image [B, V, V, 3] uint8: the three lower bytes of each code."""
        parts = self.arrays.bytes_of(cells)
        return parts[..., :3].copy() if self.arrays.is_numpy else parts[..., :3].contiguous()


def cell(kind: Any, colour: Any = 0, state: Any = 0) -> Any:
    """Type, colour and state of a cell as one number; works on numbers and on arrays."""
    return kind + (colour << 8) + (state << 16)


def fold_seed(seed: int) -> int:
    """Any Python integer as a signed 64-bit one."""
    return (int(seed) + 2**63) % 2**64 - 2**63
