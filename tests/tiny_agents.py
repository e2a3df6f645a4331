"""The smallest environments and agents that still have everything: used by the tests of agents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.settings.agent import AgentTrainConfig, EnvTask, PolicyConfig
from expire_span.settings.run import AgentRunConfig

MIXER = ExpireSpanConfig(max_span=6, ramp=2, initial_span=0.5)


class Echo(gymnasium.Env):
    """Shows a number once; after a random number of steps the agent is to say it. Longer episodes are cut off.

    tells: `info` has "success" where the agent is right, and only there, as some environments do.
    """

    def __init__(self, longest: int = 9, limit: int = 6, multi: bool = False, tells: bool = False) -> None:
        self.longest, self.limit, self.multi, self.tells = longest, limit, multi, tells
        self.observation_space = spaces.Dict(
            {"number": spaces.Discrete(4, start=1), "clock": spaces.Box(0, 1, (2,), np.float32)}
        )
        self.action_space = spaces.MultiDiscrete([3, 2]) if multi else spaces.Discrete(3, start=5)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number, self.length = int(self.np_random.integers(1, 4)), int(self.np_random.integers(2, self.longest + 1))
        self.time = 0
        return self._see(self.number), self._info()

    def step(self, action: Any) -> Any:
        first = int(action[0]) if self.multi else int(action) - 5
        assert 0 <= first < 3
        self.time += 1
        terminated = self.time >= self.length
        right = terminated and first == self.number - 1
        reward = float(right) + 0.01 * float(self.np_random.random())
        seen = self._see(int(self.np_random.integers(1, 5)))
        told = {"success": True} if right and self.tells else {}
        return seen, reward, terminated, self.time >= self.limit, self._info() | told

    def _see(self, number: int) -> dict[str, Any]:
        return {"number": np.int64(number), "clock": np.array([self.time / 10, 0.5], np.float32)}

    def _info(self) -> dict[str, Any]:
        return {"optimal_action": np.array([self.number - 1, 1]) if self.multi else self.number - 1 + 5}


class Torque(gymnasium.Env):
    """Has continuous actions, which no agent here can take."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)


class Broken(Echo):
    """Goes wrong in the way that it is asked for; see the test of what environments do wrong."""

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong
        if wrong == "make":
            raise KeyError("nothing there")
        if wrong == "empty":
            self.observation_space = spaces.Box(-1, 1, (0,), np.float32)

    def reset(self, **given: Any) -> Any:
        if self.wrong == "reset":
            raise RuntimeError("no reset\ntoday")
        return super().reset(**given)

    def step(self, action: Any) -> Any:
        seen, reward, terminated, truncated, info = super().step(action)
        if self.wrong == "step":
            raise SystemExit(3)
        if self.wrong == "nan":
            seen["clock"][1] = np.nan
        if self.wrong == "range":
            seen["number"] = np.int64(9)
        if self.wrong == "success":
            info["success"] = "yes"
        if self.wrong == "reward":
            reward = float("inf")
        never = self.wrong == "never"
        return seen, reward, terminated and not never, truncated and not never, info


def register() -> None:
    kinds: dict[str, Any] = {"Echo": Echo, "Torque": Torque, "Broken": Broken}
    for name, kind in kinds.items():
        if f"Tiny/{name}-v0" not in gymnasium.registry:
            gymnasium.register(f"Tiny/{name}-v0", entry_point=kind)


register()


def tiny_agent(env: str = "Tiny/Echo-v0", task: dict[str, Any] | None = None, **train: Any) -> AgentRunConfig:
    model = PolicyConfig.modern(dim=16, layers=2, heads=2, ff_dim=16, mixer=MIXER)
    settings = {"steps": 6, "envs": 4, "window": 8, "log_every": 2, "eval_every": 3, "eval_episodes": 8}
    settings |= {"test_episodes": 8, "checkpoint_every": 2, "device": "cpu", "warmup": 1}
    return AgentRunConfig(EnvTask(env=env, **(task or {})), model, AgentTrainConfig(**{**settings, **train}))


def with_mixer(config: AgentRunConfig, mixer: Any) -> AgentRunConfig:
    return replace(config, model=replace(config.model, mixer=mixer))
