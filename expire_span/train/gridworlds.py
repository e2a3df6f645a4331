"""The grid worlds of this package as environments of an agent: one batched engine, on the agent's device."""

from __future__ import annotations

import difflib
import re
from typing import Any

import torch
from torch import Tensor

from expire_span.settings.agent import EnvTask, ObservationField
from expire_span.tasks.gridworlds import build_engine, level_config, list_ids
from expire_span.tasks.gridworlds.sentences import WORDS

from .environments import Environments, to_tensor


class GridWorlds(Environments):
    """All environments as one batched engine, whose own `state_dict` a checkpoint holds."""

    batched = True

    def __init__(self, task: EnvTask, count: int, device: torch.device, first: int) -> None:
        super().__init__(task, count, device)
        where = ("torch", str(device)) if device.type == "cuda" else ("numpy", "cpu")
        self.engine = build_engine(_settings(task), count, backend=where[0], device=where[1])
        self.numbers = list(range(first, first + count))
        view, text = self.engine.view, self.engine.text_length
        self.fields = (ObservationField("image", "grid", (view, view, 3)),)
        if text:
            self.fields += (ObservationField("text", "words", (text,), (len(WORDS),) * text),)
        self.actions = (int(self.engine.num_actions),)
        self._finish_fields()

    def facts(self) -> dict[str, Tensor]:
        return {name: to_tensor(x, self.device) for name, x in self.engine.info().items()}

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: torch.as_tensor(x).clone() for name, x in self.engine.snapshot().items()}
        return {"arrays": arrays, "observation": self.observation, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        move = (lambda x: x.cpu().numpy().copy()) if self.engine.arrays.is_numpy else (lambda x: x.to(self.device))
        self.engine.restore({name: move(x) for name, x in state["arrays"].items()})
        self.observation = {name: x.to(self.device) for name, x in state["observation"].items()}
        self.steps = state["steps"].to(self.device) if "steps" in state else self.steps

    def _begin_all(self, seed: int) -> None:
        self.engine.reset(seed, environments=self.numbers)

    def _begin_rows(self, rows: Tensor) -> None:
        self.engine.begin_ended()  # after a step, the rows that have ended are those that are over

    def _advance(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = actions[:, 0]
        out = self.engine.step(chosen.cpu().numpy() if self.engine.arrays.is_numpy else chosen)
        parts = [to_tensor(x, self.device) for x in (out.reward, out.terminated, out.truncated)]
        return parts[0], parts[1], parts[2], to_tensor(self.engine.success, self.device).float()

    def _observe(self) -> dict[str, Tensor]:
        return {name: to_tensor(x, self.device) for name, x in self.engine.observe().items()}


def _settings(task: EnvTask) -> Any:
    """The settings of a registered environment id, with fields replaced by the task's options."""
    known = re.fullmatch(r"ExpireSpan/(\w+)-(\w+)-v0", task.env)
    if not known or task.env not in list_ids():
        near = difflib.get_close_matches(task.env, list_ids(), n=1)
        raise ValueError(
            f"unknown environment {task.env!r}; {f'did you mean {near[0]}?' if near else 'see docs/agents.md'}"
        )
    try:
        return level_config(known[1], known[2], **task.arguments)
    except TypeError as error:
        raise ValueError(f"task.options {task.options} do not fit {task.env}: {error}") from error
