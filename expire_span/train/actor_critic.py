"""Reinforcement learning: PPO with generalised advantages over any memory system, or imitation of an expert.

One update: play `window` steps in every environment, one at a time, with memories that expire (rollout.py); compute advantages;
then read the window again as blocks, from the one state it began with (replay.py), and improve the policy:

    ratio_t = p(a_t) / p_played(a_t)
    loss = -mean min(ratio A, clip(ratio, 1 - c, 1 + c) A) + v (V - target)^2 - h entropy + w mean span of new memories

The weight w of the span loss stays zero until the agent succeeds: the budget controller gets the share of failed episodes as
the task's loss. Otherwise a cue could expire before the agent has learned to use it, and nothing would lengthen its span again.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from expire_span.checkpoint import Snapshot
from expire_span.disk.sizes import show_bytes
from expire_span.models.policy import Policy
from expire_span.models.state import move
from expire_span.models.systems import find
from expire_span.runs import UserError
from expire_span.settings.run import AgentRunConfig

from . import randomness
from .agent_evaluation import AgentResult, evaluate_agent
from .budget import BudgetController
from .build_environments import build_environments, decide_inputs
from .credit import CreditWeights
from .devices import build_accelerator, check_processes, impl_of
from .evaluate import memory_bytes
from .loop import Fault
from .optimizers import build_optimizers, rate_factor, set_rates
from .replay import Window, replay
from .reward_scale import RewardScale
from .rollout import EpisodeSums, Player
from .session import resume, train
from .trackers import check_tracker
from .weight_average import WeightAverage

__all__ = ["AgentLearner", "resume", "train"]

VALID, TEST = 1, 2
"""Numbers of the splits of seeds for evaluations during training and for the final one; training itself has 0."""
MOST_ROWS = 512
"""Largest number of environments side by side in an evaluation, where a batched engine steps them."""
WINDOWS_JUDGED = 5.0
"""Updates over which the budget controller averages the share of failures. A window holds about a hundred episodes, so few are
enough; with the twenty of supervised training, the span loss began some forty updates after the task was solved."""
LEAST_GRADIENT = 1e-5
"""Adam's epsilon. It is large because an agent that has solved its task has hardly any gradient, and should not take steps of
full size along the noise that is left."""
_PREFIX = "policy."
"""Prefix of the policy's weights in the trained module; checkpoints name them without it."""


def split_seed(seed: int, split: int) -> int:
    """The seed of a split's episodes: no two splits of runs with seeds below 2**32 share any."""
    return seed * 4 + split


class Improver(nn.Module):
    """The policy with its loss: the module that is trained, and that DDP wraps where there are several processes."""

    def __init__(self, policy: Policy, config: AgentRunConfig) -> None:
        super().__init__()
        self.policy, self.config = policy, config.train
        self.entropy = config.train.entropy
        """Weight of the entropy bonus now."""

    def forward(self, window: Window, rows: list[int] | None, span_weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of these rows of a window (None: all rows), and its parts by name for the metrics."""
        window = window.take(rows)
        out = replay(self.policy, window)
        of = lambda x: x.flatten()[out.index]  # noqa: E731
        error = (out.value - of(window.target)).square().mean()
        price = out.span.mean() + out.other_price
        parts = {"value_loss": error, "entropy": out.entropy.mean(), "span_loss": price}
        if out.expert_log_prob is not None:
            aim = -out.expert_log_prob.mean()
            parts["imitation_loss"] = aim
        else:
            aim, more = self._surrogate(out.log_prob - of(window.log_prob), of(window.advantage))
            parts |= {"policy_loss": aim, **more}
        loss = aim + self.config.value_weight * error - self.entropy * parts["entropy"] + span_weight * price
        if out.reward is not None and window.reward is not None:
            parts["reward_loss"] = (out.reward - of(window.reward)).square().mean()
            loss = loss + self.config.reward_weight * parts["reward_loss"]
        return loss, {name: x.detach() for name, x in {"loss": loss, **parts}.items()}

    def _surrogate(self, log_ratio: Tensor, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """PPO's clipped surrogate loss, and its statistics."""
        advantage = (advantage - advantage.mean()) / advantage.std().clamp_min(self.config.least_spread)
        ratio, limit = log_ratio.exp(), self.config.clip_ratio
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - limit, 1 + limit) * advantage)
        clipped = ((ratio - 1).abs() > limit).float().mean()
        return -gain.mean(), {"kl": (ratio - 1 - log_ratio).mean(), "clipped": clipped}


class AgentLearner:
    """A policy that learns in its environments: everything that changes while a run is trained. See `loop.Learner`."""

    def __init__(self, config: AgentRunConfig) -> None:
        check_tracker(config.train.tracker)
        self.accelerator = build_accelerator(config.train.device)
        processes, device = self.accelerator.num_processes, self.accelerator.device
        self.impl, self.warmup = impl_of(config.model, device), config.train.warmup
        check_processes(config, self.accelerator)
        if config.train.envs % processes:
            raise ValueError(f"envs must be a multiple of processes, got envs {config.train.envs} and {processes}")
        count = config.train.envs // processes
        if count % config.train.minibatches:
            given = f"{config.train.minibatches} and {count}"
            raise ValueError(f"minibatches must divide the environments of each process, got {given}")
        task, why = decide_inputs(config.task)
        self.notes = [why] if why else []
        config = replace(config, task=task)
        envs = build_environments(task, count, device, first=self.accelerator.process_index * count)
        if config.model.observation:
            envs.keep_fields(config.model.observation)
        seen = {"observation": envs.fields, "actions": envs.actions, "continuous": envs.continuous}
        model = replace(config.model, **seen)
        self.config, self.train_config = replace(config, model=model), config.train
        randomness.seed_everything(config.seed)
        improver = Improver(Policy(model).to(device), self.config)
        self.model, *self.wrapped = self.accelerator.prepare(improver, *build_optimizers(improver, config.train))
        self.optimizers = [w.optimizer for w in self.wrapped]
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            if "betas" in group:
                group["eps"] = LEAST_GRADIENT
        if processes > 1:  # weights were drawn with one seed; from here on each process draws its own actions
            torch.manual_seed(config.seed + self.accelerator.process_index)
        envs.begin(split_seed(config.seed, 0))
        scale = RewardScale(count, device, self._add_up) if config.train.scale_rewards else None
        credit = CreditWeights(device, self._add_up) if config.train.weigh_credit else None
        unit = RewardScale(count, device, self._add_up) if model.predict_rewards else None
        self.player = Player(self.trained, envs, task, scale, credit, unit, config.train.stagger)
        kinds = [find(mixer.kind).learns_spans for mixer in model.mixers]
        self.budgeted = [n for n, learns in enumerate(kinds) if learns] or list(range(model.layers))
        self.budget = self._build_budget()
        self.failure = torch.ones((), device=device)  # share of failed episodes in the newest window with any
        self.rows: list[dict[str, Any]] = []  # measurements of the updates since the last line of metrics
        self.episodes, self.played, self.rate = EpisodeSums(), 0, 0.0
        self.average = WeightAverage(config.train.averaging)
        self.best: dict[str, Any] | None = None  # score, rank and weights of the best evaluation

    def _build_budget(self) -> BudgetController | None:
        if not self.train_config.budget.active:
            return None
        size = memory_bytes(self.config.model, 4)
        layers, device = len(self.budgeted), self.accelerator.device
        more: dict[str, Any] = {"device": device, "loss_memory": WINDOWS_JUDGED}
        return BudgetController(self.train_config.budget, layers=layers, bytes_per_memory=size, **more)

    def _add_up(self, sums: Tensor) -> Tensor:
        """The sum of these numbers over all processes."""
        return self.accelerator.reduce(sums, "sum")  # type: ignore[return-value]

    @property
    def trained(self) -> Policy:
        """The policy itself, without the wrapper for several processes."""
        return self.accelerator.unwrap_model(self.model).policy

    def fingerprint(self) -> dict[str, Any]:
        return {}

    # One update

    def step(self, index: int) -> int:
        c = self.train_config
        expert_rows = round(c.expert_share * self.player.envs.count) if index < c.imitate else None
        played = self.player.play(c.window, gamma=c.gamma, gae_lambda=c.gae_lambda, expert_rows=expert_rows)
        self.rate = rate_factor(index, c)
        set_rates(self.optimizers, self.rate)
        if c.anneal_entropy:
            self.accelerator.unwrap_model(self.model).entropy = c.entropy * self.rate
        weight = self.budget.weight if self.budget is not None else torch.tensor(c.span_weight)
        weight = weight.to(self.accelerator.device)
        self.trained.train()
        pieces = self._improve_all(played.window, weight)
        self.trained.encoder.note(played.window.observation)
        self.average.update(self.trained)
        means = {name: torch.stack([p[name] for p in pieces]).mean() for name in pieces[0]}
        if self.player.credit is not None:
            shares = dict(zip(("signal_now", "signal_later"), self.player.credit.shares))
            means |= {"later_credit": self.player.credit.later, **shares}
        self.rows.append({**means, "span_weight": weight, "live": played.live, "bytes": played.bytes_held})
        self.episodes.add(played.episodes)
        self.played += c.window * c.envs
        self._update_budget(played.live, played.episodes)
        return c.window * c.envs

    def _improve_all(self, window: Window, weight: Tensor) -> list[dict[str, Tensor]]:
        """Train on a window for several epochs; stop early once the KL divergence from the playing policy exceeds kl_limit."""
        pieces: list[dict[str, Tensor]] = []
        for _ in range(self.train_config.epochs):
            epoch = [self._improve(window, rows, weight) for rows in self._parts()]
            pieces += epoch
            moved = torch.stack([piece.get("kl", piece["loss"].new_zeros(())) for piece in epoch]).mean()
            if float(self.accelerator.reduce(moved, "mean")) > self.train_config.kl_limit:  # type: ignore[arg-type]
                break
        return pieces

    def _parts(self) -> list[list[int] | None]:
        """The rows of each optimizer step of an epoch, in random order."""
        count, parts = self.player.envs.count, self.train_config.minibatches
        if parts == 1:
            return [None]
        return [rows.tolist() for rows in torch.randperm(count).chunk(parts)]

    def _improve(self, window: Window, rows: list[int] | None, weight: Tensor) -> dict[str, Tensor]:
        loss, parts = self.model(window, rows, weight)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.train_config.clip or float("inf"))
        for optimizer in self.wrapped:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return {**parts, "grad_norm": torch.as_tensor(norm, device=loss.device)}

    def _update_budget(self, live: Tensor, episodes: EpisodeSums) -> None:
        """Update the weight of the span loss; the controller gets the share of failed episodes as the task's loss."""
        if self.budget is None:
            return
        held = float(torch.stack(self._limited(list(live))).mean())
        seen = torch.tensor([episodes.successes, episodes.judged, held], device=self.accelerator.device)
        successes, judged, held = self.accelerator.reduce(seen, "sum").tolist()  # type: ignore[union-attr]
        if judged:
            self.failure = torch.tensor(1 - successes / judged, device=self.accelerator.device)
        self.budget.update(
            torch.tensor(held / self.accelerator.num_processes, device=self.failure.device), self.failure
        )

    # What is measured

    def metrics(self) -> dict[str, Any]:
        names = [n for n in self.rows[0] if n not in ("live", "bytes", "span_weight")]
        line: dict[str, Any] = {n: float(torch.stack([r[n] for r in self.rows if n in r]).mean()) for n in names}
        line |= {"span_weight": float(self.rows[-1]["span_weight"]), "lr": self.train_config.lr * self.rate}
        line |= {"live": torch.stack([r["live"] for r in self.rows]).mean(0).tolist()}
        line |= {"bytes_held": self.rows[-1]["bytes"], "env_steps": self.played, **self._episode_means()}
        self.rows.clear()
        return line

    def _episode_means(self) -> dict[str, Any]:
        done, self.episodes = self.episodes, EpisodeSums()
        mean = lambda x: x / done.count if done.count else None  # noqa: E731
        score = done.success if done.judged else mean(done.returns)
        return {"score": score, "return": mean(done.returns), "episode_steps": mean(done.steps), "episodes": done.count}

    def find_fault(self) -> Fault | None:
        for index, row in enumerate(self.rows):
            for name, words in (("loss", "the loss"), ("grad_norm", "the gradient norm")):
                if not math.isfinite(float(row[name])):
                    advice = f"try a lower --train.lr (now {self.train_config.lr:g})"
                    place = f"in the window of {self.train_config.window} steps before that update"
                    return Fault(len(self.rows) - 1 - index, f"{words} became {float(row[name])}", place, advice)
        return None

    def evaluate(self) -> dict[str, Any]:
        with self.average.in_place_of(self.trained):
            result = self._score(VALID, self.train_config.eval_episodes)
            self._keep_best(result)
        line = {"score": result.score, "return": result.mean_return, "live": result.live, "peak_live": result.peak_live}
        return line | {"bytes_held": 0, "best": self.best["score"] if self.best else None}

    def _limited(self, live: list[Any]) -> list[Any]:
        """The entries of those layers that the budget limits, of one number per layer; all where some layer reports none."""
        return [live[n] for n in self.budgeted] if len(live) == self.config.model.layers else live

    def _keep_best(self, result: AgentResult) -> None:
        """Keep these weights if they are the best so far; `AgentTrainConfig.goal` says what is better."""
        target = self.budget.target * len(self.budgeted) if self.budget is not None else 0.0
        # A share of episodes above a threshold says little while few are: their mean return shows progress sooner.
        progress = result.worst_score if self.config.task.success_return is None else result.mean_return
        rank = rank_weights(
            result.worst_score, progress, sum(self._limited(result.live)), self.train_config.goal, target
        )
        if self.best is not None and rank < tuple(self.best["rank"]):
            return
        weights = {name: x.detach().cpu().clone() for name, x in self.trained.state_dict().items()}
        self.best = {"score": result.score, "rank": list(rank), "weights": weights}

    def final_result(self) -> dict[str, Any]:
        """Score the best weights on episodes not seen before; they stay in the policy."""
        if self.best is not None:
            self.trained.load_state_dict(self.best["weights"])
        return {**self._score(TEST, self.train_config.test_episodes).to_dict(), "env_steps": self.played}

    def _score(self, split: int, episodes: int) -> AgentResult:
        """Every process plays all episodes, so that all have the same result without exchanging any."""
        seed, rows = split_seed(self.config.seed, split), self.train_config.envs
        # Many rows cost little more than few, and with more rows fewer rounds wait for their longest episode.
        if self.player.envs.batched:
            rows = max(rows, min(episodes, MOST_ROWS))
        return evaluate_agent(self.trained, self.config.task, episodes, seed=seed, rows=rows)

    def describe(self, line: dict[str, Any]) -> list[str]:
        show = lambda x: "-" if x is None else f"{x:.3f}"  # noqa: E731
        live = " ".join(f"{x:.1f}" for x in line["live"])
        parts = [f"score {show(line['score'])}", f"return {show(line['return'])}", f"live {live}"]
        if line["split"] == "train":
            rows = self.train_config.envs // self.accelerator.num_processes
            parts.append(f"memory {show_bytes(line['bytes_held'] / rows)} per row")
        return parts

    # Saving and loading

    def snapshot(self, step: int) -> Snapshot:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizers, options=options)
        state = {
            "processes": self.accelerator.num_processes,
            "budget": self.budget.state_dict() if self.budget is not None else None,
            "random": randomness.host_state(),
            "played": self.played,
        }
        worker = {
            "player": self.player.state_dict(),
            "failure": self.failure,
            "rows": self.rows,
            "episodes": vars(self.episodes),
            "best": self.best,
            "average": self.average.weights,
            "random": randomness.torch_state(),
        }
        weights = {name.removeprefix(_PREFIX): x for name, x in model.items()}
        return Snapshot(step, state, worker, weights, optimizer)  # type: ignore[arg-type]

    def load(self, snapshot: Snapshot) -> None:
        """Restore everything that a checkpoint holds, or only weights, where a run starts from given weights."""
        weights: dict[str, Any] = {_PREFIX + name: x for name, x in snapshot.model.items()}
        options = StateDictOptions(full_state_dict=True)
        if snapshot.weights_only:
            set_model_state_dict(self.model, weights, options=options)
            return
        saved, here = snapshot.state["processes"], self.accelerator.num_processes
        if saved != here:
            raise UserError(f"this run was trained by {saved} processes, got {here}; launch it with {saved}")
        set_state_dict(
            self.model,
            self.optimizers,
            model_state_dict=weights,
            optim_state_dict=snapshot.optimizer,  # type: ignore[arg-type]
            options=options,
        )
        if self.budget is not None:
            self.budget.load_state_dict(snapshot.state["budget"])
        worker, to_device = snapshot.worker, lambda x: move(x, self.accelerator.device)
        self.player.load_state_dict(worker["player"], to_device)
        self.average.weights = to_device(worker.get("average", {}))
        self.failure, self.rows = to_device(worker["failure"]), to_device(worker["rows"])
        self.episodes, self.best, self.played = (
            EpisodeSums(**worker["episodes"]),
            worker["best"],
            snapshot.state["played"],
        )
        randomness.load_host_state(snapshot.state["random"])
        randomness.load_torch_state(worker["random"])


def rank_weights(score: float, progress: float, live: float, goal: float, target: float) -> tuple[float, float, float]:
    """Sort key of an evaluation, larger is better: until the score reaches the goal, the progress; from there on how few
    memories above the target live, then the score itself."""
    if score < goal:
        return (min(progress, goal - 1e-9), progress, 0.0)
    return (goal, -max(live, target), score)
