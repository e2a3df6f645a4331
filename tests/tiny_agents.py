"""The smallest environments and agents that still have everything: used by the tests of agents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.runs import RunFolder
from expire_span.settings.agent import AgentTrainConfig, EnvTask, PolicyConfig
from expire_span.settings.run import AgentRunConfig
from expire_span.train.actor_critic import AgentLearner, resume, train

CORRIDOR = "ExpireSpan/Corridor-Easy-v0"
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
    """Continuous actions: the reward is highest where the first equals what was shown at the start, and the second 5."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, unbounded: bool = False) -> None:
        high = np.array([2, np.inf if unbounded else 9], np.float32)
        self.action_space = spaces.Box(np.array([-2, -np.inf if unbounded else 1], np.float32), high)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.aim, self.time, self.taken = float(self.np_random.uniform(-1, 1)), 0, []
        return np.array([self.aim, 1], np.float32), {}

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float32 and self.action_space.contains(action), action
        self.time += 1
        self.taken.append(action)
        missed = (float(action[0]) - self.aim) ** 2 + (float(action[1]) - 5) ** 2 / 16
        return np.array([0, 0], np.float32), -100 * missed, False, self.time >= 5, {}


class Nest(gymnasium.Env):
    """Nested observations with text and a picture, and nested actions of every kind, which it checks."""

    observation_space = spaces.Dict(
        {
            "mission": spaces.Text(60),
            "inner": spaces.Tuple((spaces.Box(0, 255, (20, 18, 3), np.uint8), spaces.MultiBinary(3))),
        }
    )
    action_space = spaces.Dict(
        {
            "go": spaces.Discrete(3, start=2),
            "push": spaces.Box(-1, 3, (2, 1), np.float32),
            "more": spaces.Tuple(
                (spaces.MultiBinary(2), spaces.MultiDiscrete([2, 4]), spaces.Box(0, 5, (1,), np.int8))
            ),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.time = 0
        self.word = str(self.np_random.choice(["red", "blue", "green"]))
        return self._see(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.time += 1
        reward = float(action["go"] == 2) + float(action["push"].sum()) + float(action["more"][1][1])
        return self._see(), reward, self.time >= 4, False, {}

    def _see(self) -> Any:
        picture = self.np_random.integers(0, 256, (20, 18, 3)).astype(np.uint8)
        told = f"Go to the {self.word} door, then stop." if self.time == 0 else ""
        return {"mission": told, "inner": (picture, self.np_random.integers(0, 2, 3).astype(np.int8))}


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
        if self.wrong == "shape":
            seen["clock"] = seen["clock"][:1]
        if self.wrong == "parts":
            seen.pop("clock")
        if self.wrong == "kind":
            seen = seen["clock"]
        if self.wrong == "hang":
            while True:
                pass
        if self.wrong == "range":
            seen["number"] = np.int64(9)
        if self.wrong == "success":
            info["success"] = "yes"
        if self.wrong == "reward":
            reward = float("inf")
        never = self.wrong == "never"
        return seen, reward, terminated and not never, truncated and not never, info


def register() -> None:
    kinds: dict[str, Any] = {"Echo": Echo, "Torque": Torque, "Nest": Nest, "Broken": Broken}
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


def train_whole_and_broken(config: AgentRunConfig, folder: Path, monkeypatch: Any) -> RunFolder:
    """Train a run, and the same one broken at its third step and resumed: their files are equal. Returns the whole one."""
    whole = train(config, folder / "whole", shown=False)
    real = AgentLearner.step

    def step(self: AgentLearner, index: int) -> int:
        if index == 3:
            raise KeyboardInterrupt
        return real(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(AgentLearner, "step", step)
        with pytest.raises(KeyboardInterrupt):
            train(config, folder / "broken", shown=False)
    broken = resume(RunFolder.open(folder / "broken"), shown=False)
    for name in ("metrics.jsonl", "result.json"):
        assert (broken.path / name).read_bytes() == (whole.path / name).read_bytes(), name
    return whole


def play_twice(config: AgentRunConfig) -> AgentLearner:
    """A learner that has played two windows, so that it is in the middle of episodes and has memories of earlier steps.

    Its spans differ, so that some memories die within a window and some after it.
    """
    torch.manual_seed(1)
    learner = AgentLearner(config)
    with torch.no_grad():
        for block in learner.trained.layers():
            rule = getattr(block.mixer, "span_predictor", None)
            if rule is not None and hasattr(rule, "weight"):
                rule.weight.normal_(std=0.5)
        learner.trained.action_head.weight.normal_(std=0.2)
    learner.player.play(11, gamma=0.9, gae_lambda=0.8)
    return learner
