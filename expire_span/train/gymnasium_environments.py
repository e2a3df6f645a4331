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
from expire_span.settings.agent import EnvTask

from .environments import Environments, to_tensor
from .foreign_environments import answer_within, check_values, told
from .spaces import ActionLayout, describe_observations, flatten_observation


class GymnasiumEnvironments(Environments):
    """Gymnasium environments in this process, or each in a process of its own."""

    def __init__(self, task: EnvTask, count: int, device: torch.device, first: int) -> None:
        super().__init__(task, count, device)
        self.first = first
        self.vector, space = _make_vector(task, count)
        self.layout = ActionLayout.of(self.vector.single_action_space, task.env, task.joint_actions)
        self.actions, self.continuous = self.layout.choices, self.layout.bounded
        self.fields = describe_observations(space, words=task.text_words)
        self.episodes = np.zeros(count, np.int64)
        self.history: list[list[list[float]]] = [[] for _ in range(count)]
        self.seed, self.seen, self.infos = 0, {}, {}
        self.reports_success = False
        """Whether any step has reported success: an episode that ends without a report has failed from then on."""
        self._finish_fields()

    def facts(self) -> dict[str, Tensor]:
        names = ("optimal_action", "oracle_steps", "needed_until", "fact")
        names = names[1:] if self.continuous else names  # an expert's numbers cannot be imitated
        found = {name: np.asarray(self.infos[name], dtype=np.int64) for name in names if name in self.infos}
        if "optimal_action" in found:
            found["optimal_action"] = self._number_choices(found["optimal_action"])
        return {name: to_tensor(x, self.device) for name, x in found.items()}

    def _number_choices(self, actions: np.ndarray) -> np.ndarray:
        """Actions of the environment's space [B] or [B, K] as the K choices of a policy, which count from 0: [B, K]."""
        chosen = self.layout.number_choices(actions)
        if chosen is None:
            space, given = self.vector.single_action_space, np.asarray(actions[0]).tolist()
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
        nothing = [0] * self.width
        last = torch.tensor([h[-1] if h else nothing for h in history], device=self.device)
        begun = torch.tensor([not h for h in history], device=self.device)
        self.steps = torch.tensor([len(h) for h in history], device=self.device)
        self.observation = self._show(self._observe(), last, begun)

    def _replay(self, actions: list[list[float] | None]) -> None:
        chosen = torch.tensor([action or [0] * self.width for action in actions])
        reward, terminated, truncated, _ = self._advance(chosen)
        self.reward = reward
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
        with told(self.task.env, "reset"), answer_within(self.task, "reset", self.vector):
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
        given = self.layout.give(chosen)
        with told(self.task.env, "step"), answer_within(self.task, "step", self.vector):
            seen, reward, terminated, truncated, infos = self.vector.step(given)
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


def _make_vector(task: EnvTask, count: int) -> tuple[Any, Any]:
    """The environments, and the observation space of one before its texts become numbers."""
    try:
        import gymnasium
        from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
    except ImportError as error:
        raise UserError(f"{task.env} needs Gymnasium; install it with: {install_command('rl')}") from error
    from .environment_reader import EnvironmentReader

    def make() -> Any:
        made = gymnasium.make(task.env, disable_env_checker=True, **task.arguments)
        return EnvironmentReader(made, task.env, task.text_words)

    with told(task.env, "its making", task.options), answer_within(task, "its making"):
        trial = make()
        given = trial.given
        trial.close()
    kind = AsyncVectorEnv if task.processes else SyncVectorEnv
    return kind([make] * count, autoreset_mode=AutoresetMode.DISABLED), given
