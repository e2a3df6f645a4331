"""Any registered Gymnasium environment as environments of an agent, through Gymnasium's vector API.

Every episode begins with a seed of its own, so an environment's state follows from that seed and the actions since. A
checkpoint holds these, and resuming replays the actions, so that no environment needs to be able to save itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from expire_span.errors import UserError
from expire_span.extras import install_command
from expire_span.settings.agent import EnvTask, ObservationField

from .environments import Environments, to_tensor
from .foreign_environments import check_values, told

MOST_WORDS = 4096
"""An integer Box with at most this many values is read as words, one with more as numbers."""
LARGEST_GRID = 16
"""A uint8 Box with three channels and at most this many cells a side is read as a grid of MiniGrid; a larger one is a
picture."""


class GymnasiumEnvironments(Environments):
    """Gymnasium environments in this process, or each in a process of its own."""

    def __init__(self, task: EnvTask, count: int, device: torch.device, first: int) -> None:
        super().__init__(task, count, device)
        self.first, self.vector = first, _make_vector(task, count)
        space = self.vector.single_action_space
        self.fields, self.actions = describe_observations(space_of(self.vector)), describe_actions(space, task.env)
        self.starts = np.atleast_1d(np.asarray(getattr(space, "start", 0), dtype=np.int64))
        self.flat = type(space).__name__ == "Discrete"
        self.episodes = np.zeros(count, np.int64)
        self.history: list[list[list[int]]] = [[] for _ in range(count)]
        self.seed, self.seen, self.infos = 0, {}, {}
        self.reports_success = False
        """Whether any step has reported success: an episode that ends without a report has failed from then on."""
        self._finish_fields()

    def facts(self) -> dict[str, Tensor]:
        names = ("optimal_action", "oracle_steps", "needed_until", "fact")
        found = {name: np.asarray(self.infos[name], dtype=np.int64) for name in names if name in self.infos}
        if "optimal_action" in found:
            found["optimal_action"] = self._number_choices(found["optimal_action"])
        return {name: to_tensor(x, self.device) for name, x in found.items()}

    def _number_choices(self, actions: np.ndarray) -> np.ndarray:
        """Actions of the environment's space [B] or [B, K] as the K choices of a policy, which count from 0: [B, K]."""
        chosen = actions.reshape(self.count, -1) - self.starts
        wrong = chosen.shape[1] != len(self.actions) or ((chosen < 0) | (chosen >= np.array(self.actions))).any()
        if wrong:
            space, given = self.vector.single_action_space, actions[0].tolist()
            raise UserError(
                f"the optimal_action of environment {self.task.env} must be an action of {space}, got {given}"
            )
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "episodes": self.episodes.tolist(),
            "history": [[list(a) for a in h] for h in self.history],
            "reports_success": self.reports_success,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replay every row's saved actions, with rows that have fewer starting later, so that all finish at the same step.

        Before its start a row takes arbitrary actions in an episode that is then reset.
        """
        history = state["history"]
        longest = max(len(actions) for actions in history)
        self.begin(state["seed"])
        episodes = np.asarray(state["episodes"], np.int64)
        for time in range(longest + 1):
            starting = np.array([longest - len(actions) == time for actions in history])
            if starting.any():
                self.episodes = np.where(starting, episodes, self.episodes)
                self._reset(starting)
            if time < longest:
                late = [time - (longest - len(actions)) for actions in history]  # place of each row in its own episode
                self._replay([h[n] if n >= 0 else None for h, n in zip(history, late)])
        self.history = [[list(a) for a in actions] for actions in history]
        self.reports_success = state.get("reports_success", False)
        last = torch.tensor([h[-1] if h else list(self.actions) for h in history], device=self.device)
        begun = torch.tensor([not h for h in history], device=self.device)
        self.observation = self._show(self._observe(), last, begun)

    def _replay(self, actions: list[list[int] | None]) -> None:
        chosen = torch.tensor([action or [0] * len(self.actions) for action in actions])
        _, terminated, truncated, _ = self._advance(chosen)
        ended = (terminated | truncated).cpu().numpy()
        if ended.any():  # only rows before their start can end: the replayed episodes were still running
            self._reset(ended)

    def close(self) -> None:
        self.vector.close()

    def _begin_all(self, seed: int) -> None:
        self.seed, self.episodes = seed, np.zeros(self.count, np.int64)
        self._reset(np.ones(self.count, bool))

    def _begin_rows(self, rows: Tensor) -> None:
        chosen = rows.cpu().numpy()
        self.episodes = self.episodes + chosen
        self._reset(chosen)

    def _reset(self, rows: np.ndarray) -> None:
        seeds = [episode_seed(self.seed, self.first + n, int(e)) for n, e in enumerate(self.episodes)]
        with told(self.task.env, "reset"):
            seen, infos = self.vector.reset(seed=seeds, options={"reset_mask": rows})
        self._note(seen, infos, rows)
        self.history = [[] if begun else past for begun, past in zip(rows, self.history)]

    def _note(self, seen: Any, infos: dict[str, Any], rows: np.ndarray) -> None:
        """Store the observations of all rows, and the infos of the rows that were stepped or reset."""
        self.seen = flatten_observation(seen)
        for field in self.fields:
            if field.name in self.seen:
                check_values(self.task.env, f"observation {field.name}", self.seen[field.name], field)
        for name, values in infos.items():
            if isinstance(values, np.ndarray) and values.dtype != object and values.shape[:1] == (self.count,):
                old = self.infos.get(name, np.zeros_like(values))
                self.infos[name] = np.where(rows.reshape(-1, *[1] * (values.ndim - 1)), values, old)

    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = actions.cpu().numpy()
        given = chosen + self.starts
        with told(self.task.env, "step"):
            seen, reward, terminated, truncated, infos = self.vector.step(given[:, 0] if self.flat else given)
        self._note(seen, infos, np.ones(self.count, bool))
        check_values(self.task.env, "reward", reward)
        for past, action in zip(self.history, chosen.tolist()):
            past.append(action)
        self.reports_success |= "success" in infos
        silent = np.full(self.count, 0.0 if self.reports_success else np.nan)
        with told(self.task.env, "its report of success"):
            success = np.asarray(infos.get("success", silent), np.float32)
        parts = [np.asarray(reward, np.float32), terminated, truncated, success]
        reward, terminated, truncated, success = (to_tensor(x, self.device) for x in parts)
        return reward, terminated, truncated & ~terminated, success

    def _observe(self) -> dict[str, Tensor]:
        return {name: to_tensor(x, self.device) for name, x in self.seen.items()}


def episode_seed(seed: int, row: int, episode: int) -> int:
    """A 31-bit seed for one episode of one row; it does not depend on the other rows."""
    return int(np.random.SeedSequence([seed, row, episode]).generate_state(1)[0] >> 1)


def _make_vector(task: EnvTask, count: int) -> Any:
    try:
        import gymnasium
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
    except ImportError as error:
        raise UserError(f"{task.env} needs Gymnasium; install it with: {install_command('rl')}") from error
    make = lambda: gymnasium.make(task.env, disable_env_checker=True, **task.arguments)  # noqa: E731
    with told(task.env, "its making", task.options):
        make().close()
    kind = AsyncVectorEnv if task.processes else SyncVectorEnv
    return kind([make] * count, autoreset_mode=AutoresetMode.DISABLED)


def space_of(vector: Any) -> Any:
    return vector.single_observation_space


def describe_observations(space: Any, name: str = "") -> tuple[ObservationField, ...]:
    """A Gymnasium observation space as fields; what cannot be read is refused."""
    kind, label = type(space).__name__, name or "value"
    if kind in ("Dict", "Tuple"):
        parts = space.spaces.items() if kind == "Dict" else enumerate(space.spaces)
        inner = [describe_observations(part, f"{name}.{key}" if name else str(key)) for key, part in parts]
        return tuple(field for fields in inner for field in fields)
    if kind == "Discrete":
        return (ObservationField(label, "choices", (), (int(space.n),), (int(space.start),)),)
    if kind in ("MultiDiscrete", "MultiBinary"):
        sizes = space.nvec.flatten() if kind == "MultiDiscrete" else np.full(space.shape, 2).flatten()
        lows = getattr(space, "start", np.zeros(space.shape, np.int64)).flatten()
        return (ObservationField(label, "choices", space.shape, tuple(sizes.tolist()), tuple(lows.tolist())),)
    if kind != "Box":
        raise UserError(f"observations must be Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple, got {space}")
    return (_describe_box(space, label),)


def _describe_box(space: Any, label: str) -> ObservationField:
    shape = tuple(space.shape)
    if 0 in shape:
        raise UserError(f"observation {label} must hold at least one number, got the shape {shape}")
    if space.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3 and max(shape[:2]) <= LARGEST_GRID:
        return ObservationField(label, "grid", shape)
    if np.issubdtype(space.dtype, np.integer) and shape:
        low, high = int(space.low.min()), int(space.high.max())
        if high - low < MOST_WORDS:
            places = int(np.prod(shape))
            return ObservationField(label, "words", shape, (high - low + 1,) * places, (low,) * places)
    return ObservationField(label, "numbers", shape)


def describe_actions(space: Any, env: str) -> tuple[int, ...]:
    """The number of values of each choice; continuous actions are refused."""
    kind = type(space).__name__
    if kind == "Discrete":
        return (int(space.n),)
    if kind == "MultiDiscrete" and len(space.shape) == 1:
        return tuple(int(n) for n in space.nvec)
    raise UserError(f"actions must be Discrete or MultiDiscrete, got {space} of {env}; wrap it into discrete choices")


def flatten_observation(seen: Any, name: str = "") -> dict[str, np.ndarray]:
    """Nested observations by dotted name, as `describe_observations` names them."""
    if isinstance(seen, (dict, tuple)):
        parts = seen.items() if isinstance(seen, dict) else enumerate(seen)
        inner = [flatten_observation(part, f"{name}.{key}" if name else str(key)) for key, part in parts]
        return {label: x for found in inner for label, x in found.items()}
    return {name or "value": np.asarray(seen)}
