"""Evaluation of agents: success by difficulty with confidence intervals, what is kept in memory, and whether it was needed.

A row is one of the environments that run side by side. Every row plays the same number of whole episodes, so that short
episodes are not favoured. Difficulty is the expert's number of steps, where the environment reports it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from expire_span.errors import UserError
from expire_span.models.policy import Policy
from expire_span.settings.agent import EnvTask

from .build_environments import build_environments
from .retention import Retention, RetentionCounter
from .rollout import count_memories, judge

LEAST_IN_BAND = 20
"""Bands with fewer episodes than this are not used to choose the best weights."""
MOST_STEPS = 10_000
"""Steps after which an evaluation gives up if the present episodes of all rows are still running."""
BAND = 10
"""Width of a band of difficulty, in expert steps."""


@dataclass(frozen=True)
class DifficultyBand:
    """Episodes of about the same difficulty."""

    first: int | None
    """`first` and `last`: the range of expert steps; None where the environment does not report them."""
    last: int | None
    episodes: int
    success: float | None
    low: float | None
    """95% Wilson interval of the success."""
    high: float | None
    mean_return: float
    mean_steps: float
    live: float | None
    """Mean living memories per step and layer; None where memories cannot be counted."""
    peak_live: int | None
    """Largest number of living memories in any row, layer and step."""


@dataclass(frozen=True)
class AgentResult:
    score: float
    """Success where it is known, else the mean return."""
    score_name: str
    episodes: int
    mean_return: float
    low: float | None
    high: float | None
    mean_steps: float
    live: list[float]
    """Mean living memories per step, one number per layer; what the memory system reports where they cannot be counted."""
    peak_live: list[float]
    """Largest number of living memories of any row and step, one number per layer."""
    rows: int = 1
    """Number of environments side by side; bytes divided by it are those of one environment."""
    mean_bytes: float = 0.0
    """Mean bytes that the state of all rows and layers occupied after a step."""
    peak_bytes: int = 0
    steps_over_oracle: float | None = None
    """Steps of all episodes divided by those that the expert would need; None where the environment does not report them."""
    bands: list[DifficultyBand] = field(default_factory=list)
    retention: Retention | None = None
    """How well the kept memories match the needed ones; None where the environment does not report needs or nothing expires."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def worst_score(self) -> float:
        """The score of the hardest band that has at least `LEAST_IN_BAND` episodes; without bands, the score of all."""
        shares = [b.success for b in self.bands if b.success is not None and b.episodes >= LEAST_IN_BAND]
        return min([self.score, *shares])


def wilson(successes: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95% Wilson confidence interval of a share, which also holds near 0 and 1 and for few episodes."""
    if not count:
        return 0.0, 1.0
    share, extra = successes / count, z * z / count
    centre, half = share + extra / 2, z * math.sqrt(share * (1 - share) / count + extra / (4 * count))
    return max((centre - half) / (1 + extra), 0.0), min((centre + half) / (1 + extra), 1.0)


@dataclass
class _Episode:
    success: float
    returned: float
    steps: int
    oracle: int | None
    live: float | None
    peak: int | None


class Control:
    """Changes the memories with which an agent acts while it is evaluated; this base changes nothing. `change` is called
    before every step, `follow` after."""

    def change(self, state: list[Any], steps: Tensor, facts: dict[str, Tensor]) -> list[Any]:
        """The state of B rows with which the agent acts. steps [B]: steps of each row's episode so far; facts: those of
        `Environments.facts`."""
        return state

    def follow(self, actions: Tensor, ended: Tensor) -> None:
        """Called after the agent has taken `actions` [B, K]; `ended` [B] (bool) marks rows whose episode is over."""


BuildControl = Callable[[Policy, EnvTask, int, torch.device, int], Control]
"""Of the policy, its task, the number of environments, the device and the seed of the evaluation."""


@torch.no_grad()
def evaluate_agent(
    policy: Policy,
    task: EnvTask,
    episodes: int,
    *,
    seed: int,
    rows: int = 64,
    greedy: bool = False,
    control: BuildControl | None = None,
) -> AgentResult:
    """Play at least `episodes` whole episodes with drawn actions, as in training, or with the likeliest ones.

    Torch's random generator is restored afterwards, so that evaluating does not change how training continues.

    Args:
        control: makes what changes the agent's memories while it plays; lab/controls.py has several by name.
    """
    policy.eval()
    device = next(policy.parameters()).device
    envs = build_environments(task, min(rows, episodes), device)
    envs.begin(seed)
    changes = control(policy, task, envs.count, device, seed) if control else Control()
    evaluation = _Evaluation(policy, task, envs, quota=-(-episodes // envs.count), greedy=greedy, control=changes)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            while not evaluation.done:
                evaluation.step()
                _check_ends(task, int(evaluation.steps.min()))
    finally:
        envs.close()
    return evaluation.result()


def _check_ends(task: EnvTask, steps: int) -> None:
    """Refuse an environment without an end, whose evaluation would not have one either."""
    if steps >= MOST_STEPS:
        advice = """end them with --task.options '{"max_episode_steps": 1000}', which Gymnasium understands"""
        raise UserError(f"no episode of {task.env} has ended after {steps:,} steps in any environment; {advice}")


class _Evaluation:
    """Steps environments side by side until each has played `quota` episodes, and gathers what was measured."""

    def __init__(self, policy: Policy, task: EnvTask, envs: Any, *, quota: int, greedy: bool, control: Control) -> None:
        self.policy, self.task, self.envs, self.quota = policy, task, envs, quota
        self.greedy, self.control = greedy, control
        self.state = policy.initial_state(envs.count, "hidden")
        zeros = lambda *shape: torch.zeros(*shape, device=envs.device)  # noqa: E731
        self.returns, self.steps, self.finished = zeros(envs.count), zeros(envs.count).long(), zeros(envs.count).long()
        self.live_sum, self.peak = zeros(envs.count), zeros(envs.count).long()
        self.counted = True
        self.live, self.looked = zeros(len(self.state)), zeros(())  # sums over steps, and how many there were
        self.peaks: Tensor | None = None
        self.episodes: list[_Episode] = []
        self.retention = RetentionCounter(policy, envs.count)
        self.held: list[int] = []  # bytes of all rows' memories after every step

    @property
    def done(self) -> bool:
        return bool((self.finished >= self.quota).all())

    def step(self) -> None:
        facts, playing = self.envs.facts(), self.finished < self.quota
        self.state = self.control.change(self.state, self.steps, facts)
        observation = {name: x.unsqueeze(1) for name, x in self.envs.observation.items()}
        choices, _, self.state, aux = self.policy(observation, self.state)
        actions = (choices.likeliest() if self.greedy else choices.sample())[:, 0]
        self._note_memories(aux, playing)
        self.held.append(aux.bytes_held)
        self.retention.add(aux, facts)
        frame = self.envs.step(actions)
        self.control.follow(actions, frame.ended)
        self.returns, self.steps = self.returns + frame.reward, self.steps + 1
        if bool(frame.ended.any()):
            self._end(frame, facts, frame.ended, playing)

    def _note_memories(self, aux: Any, playing: Tensor) -> None:
        held = count_memories(self.state)  # [layers, B], after this step's deletions
        if held is None:
            self.counted = False
            self.live = self.live + aux.live.float() * playing.sum()
            self.looked = self.looked + playing.sum()
            return
        self.live_sum, self.peak = self.live_sum + held.float().mean(0), torch.maximum(self.peak, held.amax(0))
        self.live, self.looked = self.live + (held * playing).sum(1), self.looked + playing.sum()
        most = (held * playing).amax(1)
        self.peaks = most if self.peaks is None else torch.maximum(self.peaks, most)

    def _end(self, frame: Any, facts: dict[str, Tensor], ended: Tensor, playing: Tensor) -> None:
        success = judge(frame.success, self.returns, self.task)
        for row in ended.nonzero().flatten().tolist():
            steps = int(self.steps[row])
            if bool(playing[row]):
                oracle = int(facts["oracle_steps"][row]) if "oracle_steps" in facts else None
                live = float(self.live_sum[row]) / steps if self.counted else None
                peak = int(self.peak[row]) if self.counted else None
                self.episodes.append(_Episode(float(success[row]), float(self.returns[row]), steps, oracle, live, peak))
            self.retention.end(row, steps, counts=bool(playing[row]))
        self.finished = self.finished + ended.long()
        self.returns, self.live_sum = self.returns.masked_fill(ended, 0), self.live_sum.masked_fill(ended, 0)
        self.steps, self.peak = self.steps.masked_fill(ended, 0), self.peak.masked_fill(ended, 0)
        self.state = self.policy.reset_rows(self.state, ended)

    def result(self) -> AgentResult:
        if any(not math.isnan(e.success) for e in self.episodes):  # those that ended before the first report of success
            self.episodes = [replace(e, success=0.0) if math.isnan(e.success) else e for e in self.episodes]
        whole, live = _summarise(self.episodes, None), self.live / self.looked
        peaks = self.peaks if self.peaks is not None else live
        known = whole.success is not None
        return AgentResult(
            score=whole.success if whole.success is not None else whole.mean_return,
            score_name="success" if known else "return",
            episodes=whole.episodes,
            mean_return=whole.mean_return,
            low=whole.low,
            high=whole.high,
            mean_steps=whole.mean_steps,
            live=live.tolist(),
            peak_live=peaks.tolist(),
            rows=self.envs.count,
            mean_bytes=sum(self.held) / len(self.held),
            peak_bytes=max(self.held),
            steps_over_oracle=_over_oracle(self.episodes),
            bands=_bands(self.episodes),
            retention=self.retention.result(),
        )


def _over_oracle(episodes: list[_Episode]) -> float | None:
    known = [e for e in episodes if e.oracle]
    return sum(e.steps for e in known) / sum(e.oracle or 0 for e in known) if known else None


def _bands(episodes: list[_Episode]) -> list[DifficultyBand]:
    groups: dict[int, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        if episode.oracle is not None:
            groups[(max(episode.oracle, 1) - 1) // BAND].append(episode)
    return [_summarise(groups[n], n) for n in sorted(groups)]


def _summarise(episodes: list[_Episode], band: int | None) -> DifficultyBand:
    judged = [e.success for e in episodes if not math.isnan(e.success)]
    low, high = wilson(sum(judged), len(judged)) if judged else (None, None)
    first, last = (None, None) if band is None else (band * BAND + 1, (band + 1) * BAND)
    return DifficultyBand(
        first=first,
        last=last,
        episodes=len(episodes),
        success=_mean(judged),
        low=low,
        high=high,
        mean_return=sum(e.returned for e in episodes) / len(episodes),
        mean_steps=sum(e.steps for e in episodes) / len(episodes),
        live=_mean([e.live for e in episodes if e.live is not None]),
        peak_live=max((e.peak for e in episodes if e.peak is not None), default=None),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
