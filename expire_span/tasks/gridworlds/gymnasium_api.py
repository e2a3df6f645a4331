"""The grid worlds as Gymnasium environments: one environment, or a vector of many, over the same engine.

An episode depends on (seed, environment, episode) alone. `GridWorldEnv(..., environment=i).reset(seed=s)` therefore plays what
row i of `GridWorldVectorEnv.reset(seed=s)` plays. (Gymnasium's own vector environments seed row i with s + i, so that training
with seed 0 and evaluation with seed 1 would share nearly all their episodes.)
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from .engine import WorldEngine
from .levels import build_engine, level_config
from .render import render_ansi, render_rgb
from .sentences import WORDS

MODES = ("ansi", "rgb_array")


def observation_space(engine: WorldEngine) -> spaces.Dict:
    """`image`: cells in MiniGrid's encoding; `text`: word ids, where the world has sentences."""
    parts: dict[str, gym.Space] = {"image": spaces.Box(0, 255, (engine.view, engine.view, 3), np.uint8)}
    if engine.text_length:
        parts["text"] = spaces.Box(0, len(WORDS) - 1, (engine.text_length,), np.int32)
    return spaces.Dict(parts)


def _check_mode(mode: str | None) -> None:
    if mode is not None and mode not in MODES:
        raise ValueError(f"render_mode must be one of {', '.join(MODES)} or None, got {mode!r}")


class GridWorldEnv(gym.Env):
    """One environment. `world` and `level` name it; further arguments change fields of its settings."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(MODES), "render_fps": 4}

    def __init__(
        self,
        world: str = "Corridor",
        level: str = "Easy",
        *,
        render_mode: str | None = None,
        environment: int = 0,
        **changes: Any,
    ) -> None:
        _check_mode(render_mode)
        self.engine = build_engine(level_config(world, level, **changes), 1)
        self.render_mode, self.environment, self.started = render_mode, environment, False
        self.observation_space = observation_space(self.engine)
        self.action_space = spaces.Discrete(self.engine.num_actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None and not self.started:
            seed = int(self.np_random.integers(2**62))
        observation = self.engine.reset(seed, environments=[self.environment])
        self.started = True
        return _first(observation), _first(self.engine.info())

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.started:
            raise ValueError("step was called before reset; call reset first")
        if bool(self.engine.over[0]):
            raise ValueError(f"the episode ended after {int(self.engine.steps[0])} steps; call reset before step")
        if not self.action_space.contains(action):
            last = self.engine.num_actions - 1
            raise ValueError(f"an action of {self.engine.name} is an integer in 0..{last}, got {action!r}")
        out = self.engine.step([int(action)])
        info = _first(self.engine.info())
        return _first(out.observation), float(out.reward[0]), bool(out.terminated[0]), bool(out.truncated[0]), info

    def render(self) -> Any:
        if self.render_mode == "ansi":
            return render_ansi(self.engine)
        return render_rgb(self.engine) if self.render_mode == "rgb_array" else None


def _first(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    """Row 0 of arrays; numbers as Python numbers."""
    return {name: value[0].copy() if value.ndim > 1 else value[0].item() for name, value in batch.items()}


class GridWorldVectorEnv(VectorEnv):
    """Many environments side by side, with same-step, next-step or disabled autoreset."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(MODES), "autoreset_mode": AutoresetMode.NEXT_STEP}

    def __init__(
        self,
        num_envs: int = 1,
        world: str = "Corridor",
        level: str = "Easy",
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **changes: Any,
    ) -> None:
        _check_mode(render_mode)
        self.engine = build_engine(level_config(world, level, **changes), num_envs)
        self.mode = AutoresetMode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.mode}  # type: ignore[misc]
        self.num_envs, self.render_mode, self.started = num_envs, render_mode, False
        self.single_observation_space = observation_space(self.engine)
        self.single_action_space = spaces.Discrete(self.engine.num_actions)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin episodes everywhere, or in the rows of `options["reset_mask"]`. A list gives every row a seed of its own."""
        mask = (options or {}).get("reset_mask")
        if mask is not None:
            self._check_mask(mask, seed)
            self.engine.begin(mask)
        elif isinstance(seed, (list, tuple, np.ndarray)):
            self._reset_each(seed)
        else:
            super().reset(seed=seed)
            given = int(self.np_random.integers(2**62)) if seed is None and not self.started else seed
            self.engine.reset(given)
        self.started = True
        return self.engine.observe(), self._info()

    def _check_mask(self, mask: Any, seed: Any) -> None:
        if not (isinstance(mask, np.ndarray) and mask.dtype == bool and mask.shape == (self.num_envs,)):
            shape = getattr(mask, "shape", None)
            raise ValueError(
                f"reset_mask must be a bool array of shape ({self.num_envs},), got {type(mask)} of shape {shape}"
            )
        if seed is not None:
            raise ValueError(f"reset_mask begins next episodes and takes no seed, got {seed}")

    def _reset_each(self, seeds: Any) -> None:
        if len(seeds) != self.num_envs or any(seed is None for seed in seeds):
            raise ValueError(f"a list of seeds must hold {self.num_envs} integers, got {list(seeds)}")
        self.engine.reset(seeds=[int(seed) for seed in seeds], environments=[0] * self.num_envs)

    def step(self, actions: Any) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        if not self.started:
            raise ValueError("step was called before reset; call reset first")
        ended = self.engine.over.copy()
        if self.mode == AutoresetMode.DISABLED and ended.any():
            row = int(np.flatnonzero(ended)[0])
            raise ValueError(
                f"the episode of environment {row} has ended; reset it with options reset_mask before step"
            )
        out = self.engine.step(actions)
        observation = out.observation
        if self.mode == AutoresetMode.NEXT_STEP and ended.any():
            self.engine.begin(ended)
            observation = self.engine.observe()
        info = self._info()
        over = np.logical_or(out.terminated, out.truncated)
        if self.mode == AutoresetMode.SAME_STEP and over.any():
            final = {"final_obs": observation, "final_info": info, "_final_obs": over, "_final_info": over}
            self.engine.begin(over)
            observation, info = self.engine.observe(), {**self._info(), **final}
        return observation, out.reward.astype(np.float64), out.terminated, out.truncated, info

    def _info(self) -> dict[str, Any]:
        every = np.ones(self.num_envs, bool)
        info = self.engine.info()
        return {**{name: value.copy() for name, value in info.items()}, **{f"_{name}": every for name in info}}

    def render(self) -> tuple[Any, ...] | None:
        if self.render_mode is None:
            return None
        draw = render_ansi if self.render_mode == "ansi" else render_rgb
        return tuple(draw(self.engine, row) for row in range(self.num_envs))


class PreviousActionAndReward(gym.Wrapper):
    """Adds the last action and reward to the observation.

    It is off by default because an agent could write what it must remember into its own actions and read it back, without using
    its memory.
    """

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        inner = env.observation_space
        if not isinstance(inner, spaces.Dict) or not isinstance(env.action_space, spaces.Discrete):
            raise ValueError(f"needs Dict observations and Discrete actions, got {inner} and {env.action_space}")
        count = int(env.action_space.n)
        more = {"action": spaces.Discrete(count + 1), "reward": spaces.Box(-np.inf, np.inf, (1,), np.float32)}
        self.observation_space, self.nothing = spaces.Dict({**inner.spaces, **more}), count

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**options)
        return self._add(observation, self.nothing, 0.0), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return self._add(observation, int(action), float(reward)), reward, terminated, truncated, info

    def _add(self, observation: Any, action: int, reward: float) -> dict[str, Any]:
        return {**observation, "action": np.int64(action), "reward": np.array([reward], np.float32)}
