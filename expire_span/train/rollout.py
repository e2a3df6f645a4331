"""Playing: a policy acts in many environments, one step at a time, with memories that expire and are deleted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from expire_span.models.backbone import BackboneAux
from expire_span.models.policy import Policy
from expire_span.models.state import bytes_of
from expire_span.settings.agent import EnvTask
from expire_span.store import NEVER, HiddenMemory, trim_states

from .credit import CreditWeights, HeadWatch
from .environments import Environments, EnvironmentStep
from .replay import Window
from .reward_scale import RewardScale

STAGGERED = 4
"""Windows over which the first episodes are cut off."""


@dataclass
class EpisodeSums:
    """Sums over the episodes that ended, as plain numbers."""

    count: int = 0
    returns: float = 0.0
    steps: float = 0.0
    judged: int = 0
    """Number of episodes whose success is known."""
    successes: float = 0.0

    def add(self, other: EpisodeSums) -> None:
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def success(self) -> float | None:
        return self.successes / self.judged if self.judged else None


@dataclass
class Played:
    """A window of steps, and statistics of playing it."""

    window: Window
    episodes: EpisodeSums
    live: Tensor
    """Mean living memories per step and row, one number per layer."""
    bytes_held: int


class Player:
    """A policy in its environments, with its memories and running returns; each window continues where the last one ended."""

    def __init__(
        self,
        policy: Policy,
        envs: Environments,
        task: EnvTask,
        scale: RewardScale | None = None,
        credit: CreditWeights | None = None,
        unit: RewardScale | None = None,
        stagger: bool = False,
    ) -> None:
        """scale: the unit of rewards in what is learned from; None leaves them as they are. credit: weights of the parts of
        advantages; None leaves them as they are. unit: that of predicted rewards; None where none are predicted.
        stagger: cut first episodes off at different steps."""
        self.policy, self.envs, self.task, self.scale, self.credit = policy, envs, task, scale, credit
        self.unit = unit
        self.stagger, self.time = stagger, 0
        device = envs.device
        self.state: list[Any] = policy.initial_state(envs.count, "hidden")
        self.begins = torch.ones(envs.count, dtype=torch.bool, device=device)
        self.returns = torch.zeros(envs.count, device=device)
        self.steps = torch.zeros(envs.count, device=device)

    @torch.no_grad()
    def play(self, length: int, *, gamma: float, gae_lambda: float, expert_rows: int | None = None) -> Played:
        """Play a window of `length` steps.

        expert_rows: the expert's action is recorded in all rows, and taken in the first `expert_rows` of them. None: no expert.
        """
        self.policy.eval()
        start, episodes, seen = trim_states(self.state), EpisodeSums(), _Columns()
        self.state = self.policy.begin_steps(start, length + 1)  # the value of the last observation is asked too
        watch = HeadWatch(self.policy.action_head) if self.credit is not None else None
        for _ in range(length):
            seen.add(observation=self.envs.observation, begins=self.begins)
            out = self.policy(_one_step(self.envs.observation), self.state)
            actions, held = out.choices.sample()[:, 0], out.aux
            if watch is not None:
                seen.add(features=watch.read[:, 0], score=out.choices.score(actions.unsqueeze(1))[:, 0])
            log_prob = out.choices.log_prob(actions.unsqueeze(1))[:, 0]
            if expert_rows is not None:
                expert = self._ask_expert()
                seen.add(expert=expert)
                actions = torch.cat([expert[:expert_rows], actions[expert_rows:]])
            frame = self.envs.step(actions, self._cut(length))
            seen.add(reward=frame.reward, beyond=self._value_beyond(frame, out.state))
            seen.add(actions=actions, log_prob=log_prob, value=out.value[:, 0], ended=frame.ended)
            seen.add(live=_mean_live(out.state, held))
            episodes.add(self._note(frame))
            self._go_on(out.state, frame.ended)
        last = self.policy(_one_step(self.envs.observation), self.state).value[:, 0]
        self.state = self.policy.end_steps(self.state)
        if self.scale is not None:
            self.scale.update(seen.stacked("reward"), seen.stacked("ended"), gamma)
        window = seen.window(start, last, gamma, gae_lambda, self.scale)
        if self.credit is not None and watch is not None:
            watch.close()
            reward = seen.stacked("reward") * (self.scale.factor if self.scale is not None else 1.0)
            parts = seen.stacked("features"), seen.stacked("score")
            window = replace(window, advantage=self.credit.weigh(reward, window.advantage, *parts))
        if self.unit is not None:
            self.unit.update(seen.stacked("reward"), seen.stacked("ended"), 0.0)
            window = replace(window, reward=self.unit.scaled(seen.stacked("reward")))
        return Played(window, episodes, torch.stack(seen.columns["live"]).mean(0), bytes_of(self.state))

    def _cut(self, length: int) -> Tensor | None:
        """The rows whose episode is cut off at this step, each once in the first windows; None: none is."""
        self.time += 1
        if not self.stagger or self.time > STAGGERED * length:
            return None
        rows = torch.arange(self.envs.count, device=self.envs.device)
        return rows * (STAGGERED * length) // self.envs.count == self.time - 1

    def _go_on(self, state: list[Any], ended: Tensor) -> None:
        self.begins = ended
        self.state = self.policy.reset_rows(state, ended) if bool(ended.any()) else state

    def _value_beyond(self, frame: EnvironmentStep, state: list[Any]) -> Tensor:
        """The value of the final state of truncated episodes, 0 elsewhere."""
        if frame.final is None:
            return torch.zeros_like(frame.reward)
        value = self.policy(_one_step(frame.final), state).value[:, 0]
        return torch.where(frame.truncated, value, 0.0)

    def _ask_expert(self) -> Tensor:
        facts = self.envs.facts()
        if "optimal_action" not in facts:
            told = "its info has no optimal_action"
            raise ValueError(f"imitation needs an expert, and {self.task.env} has none: {told}; set --train.imitate 0")
        return facts["optimal_action"].long().view(self.envs.count, -1)  # [B, K]

    def _note(self, frame: EnvironmentStep) -> EpisodeSums:
        """Count the episodes that have just ended."""
        self.returns, self.steps, ended = self.returns + frame.reward, self.steps + 1, frame.ended
        count = int(ended.sum())
        if not count:
            return EpisodeSums()
        success = judge(frame.success, self.returns, self.task)[ended]
        judged = ~success.isnan()
        told = EpisodeSums(count, float(self.returns[ended].sum()), float(self.steps[ended].sum()))
        told.judged, told.successes = int(judged.sum()), float(success[judged].sum())
        self.returns, self.steps = self.returns.masked_fill(ended, 0), self.steps.masked_fill(ended, 0)
        return told

    def state_dict(self) -> dict[str, Any]:
        return {
            "state": trim_states(self.state),
            "begins": self.begins,
            "returns": self.returns,
            "steps": self.steps,
            "time": self.time,
            **({"scale": self.scale.state_dict()} if self.scale is not None else {}),
            **({"credit": self.credit.state_dict()} if self.credit is not None else {}),
            **({"unit": self.unit.state_dict()} if self.unit is not None else {}),
            "envs": self.envs.state_dict(),
        }

    def load_state_dict(self, saved: dict[str, Any], move: Any) -> None:
        self.envs.load_state_dict(saved["envs"])
        self.state = move(saved["state"])
        self.time = saved["time"]
        self.begins, self.returns, self.steps = (move(saved[n]) for n in ("begins", "returns", "steps"))
        if self.scale is not None:
            self.scale.load_state_dict(saved["scale"], move)
        if self.credit is not None:
            self.credit.load_state_dict(saved["credit"], move)
        if self.unit is not None:
            self.unit.load_state_dict(saved["unit"], move)


@dataclass
class _Columns:
    """The values recorded at every step, by name."""

    columns: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)

    def stacked(self, name: str) -> Tensor:
        return torch.stack(self.columns[name])

    def window(
        self, start: list[Any], last: Tensor, gamma: float, gae_lambda: float, scale: RewardScale | None
    ) -> Window:
        c = {
            name: torch.stack(x)
            for name, x in self.columns.items()
            if name not in ("observation", "live", "features", "score")
        }
        reward = c["reward"] if scale is None else scale.scaled(c["reward"])
        reward = reward + gamma * c["beyond"]
        names = self.columns["observation"][0]
        observation = {name: torch.stack([x[name] for x in self.columns["observation"]]) for name in names}
        advantage = advantages(reward, c["value"], c["ended"], last, gamma, gae_lambda)
        target, given = advantage + c["value"], (c["actions"], c["log_prob"], c["value"])
        return Window(start, c["begins"], observation, *given, advantage, target, c.get("expert"))


def advantages(reward: Tensor, value: Tensor, ended: Tensor, last: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, B]:

        delta_t = r_t + gamma (1 - ended_t) V_t+1 - V_t,   A_t = delta_t + gamma lambda (1 - ended_t) A_t+1

    `last` [B] is the value after the last step. The last reward of a truncated episode includes the value of its final state.
    """
    out, after, goes_on = torch.zeros_like(value), torch.zeros_like(last), (~ended).to(value.dtype)
    for t in reversed(range(len(reward))):
        beyond = value[t + 1] if t + 1 < len(reward) else last
        delta = reward[t] + gamma * goes_on[t] * beyond - value[t]
        after = delta + gamma * gae_lambda * goes_on[t] * after
        out[t] = after
    return out


def judge(success: Tensor, returns: Tensor, task: EnvTask) -> Tensor:
    """Success of episodes [B]: as the environment reports it, else whether the return reaches the task's threshold, else
    NaN."""
    if task.success_return is None:
        return success
    return torch.where(success.isnan(), (returns >= task.success_return).float(), success)


def count_memories(state: list[Any]) -> Tensor | None:
    """Living memories of every row, [layers, B]; None where a layer keeps no countable memories."""
    stores = [part.get("memory") if isinstance(part, dict) else None for part in state]
    if not all(isinstance(store, HiddenMemory) for store in stores):
        return None
    return torch.stack([(store.pos != NEVER).sum(1) for store in stores])  # type: ignore[union-attr]


def _mean_live(state: list[Any], aux: BackboneAux) -> Tensor:
    """Mean number of living memories per row after a step, one number per layer; counted in the stores where possible."""
    counts = [getattr(part.get("memory"), "living", None) if isinstance(part, dict) else None for part in state]
    if any(count is None for count in counts):
        return aux.live.float()
    return torch.stack(counts).float().mean(1)  # type: ignore[arg-type]


def _one_step(observation: dict[str, Tensor]) -> dict[str, Tensor]:
    """[B, ..] -> [B, 1, ..]."""
    return {name: x.unsqueeze(1) for name, x in observation.items()}
