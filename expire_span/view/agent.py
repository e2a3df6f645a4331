"""An agent's episode as a trace: what it saw, what it did, and what it kept, step by step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from expire_span.checkpoint import load_policy
from expire_span.models.actions import ActionDistribution
from expire_span.models.policy import Policy
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import AgentRunConfig
from expire_span.tasks.gridworlds import level_config, list_ids
from expire_span.train.actor_critic import TEST, split_seed
from expire_span.train.build_environments import build_environments
from expire_span.train.environments import Environments

from .episodes import LEGENDS, Describer, name_action, picture_of, to_row
from .limit import WHOLE, Cut, trace_cut
from .memory_log import MemoryFacts, MemoryLog, hidden_of, round_off, spans_by_head
from .trace import VERSION, Line

LONGEST = 8192
"""Largest number of steps of an episode that are shown."""
CANDIDATES = 16
"""Number of episodes among which the longest is chosen, since the first may end before anything is forgotten."""
GUESSES = 4
"""Number of likeliest actions that a step lists."""


def about_world(env: str) -> str:
    """A description of a grid world of this package in one sentence; a general one for other environments."""
    world = env.removeprefix("ExpireSpan/").split("-")
    known = env in list_ids() and (type(level_config(world[0], world[1])).__doc__ or "").splitlines()[0]
    return known or "The agent acts so that its rewards add up."


def about_task(config: AgentRunConfig) -> str:
    """The task in one sentence."""
    return about_world(config.task.env)


@dataclass
class AgentReader:
    """The policy of a run, ready to play. It has the interface of `source.Reader`, but reads no text."""

    name: str
    model: Policy
    config: AgentRunConfig
    lock: threading.Lock = field(default_factory=threading.Lock)
    plays = True
    reads_text: bool = False
    generates: bool = False
    vocabulary: str = "env"

    @classmethod
    def open(cls, run: RunFolder) -> AgentReader:
        return cls(run.name, load_policy(run), run.config)

    def encode(self, raw: bytes) -> Any:
        raise UserError("an agent reads no text; look at one of its episodes instead")

    def trace_text(self, raw: bytes, cut: Cut = WHOLE, count: int | None = None) -> Iterator[Line]:
        return self.encode(raw)

    def generate(self, *args: Any) -> Iterator[Line]:
        return self.encode(b"")

    def trace_sample(self, count: int | None = None, cut: Cut = WHOLE, number: int | None = None) -> Iterator[Line]:
        """The trace of test episode `number`, with actions drawn as in training; None takes a long one.

        count: most steps to show; cut: how lifetimes are shortened.
        """
        seed, most = split_seed(self.config.seed, TEST), min(count or LONGEST, LONGEST)
        chosen = self._find_long(seed) if number is None else number
        with self.lock:  # a cut changes the model itself, so no other thread may use it meanwhile
            lines = trace_cut(self.model, cut, lambda: list(self._play(seed, chosen, most)))
        yield lines[0] | {"episode": chosen}
        yield from lines[1:]

    def _find_long(self, seed: int) -> int:
        """Number of the episode, among the first `CANDIDATES`, in which the expert needs most steps; 0 without an expert."""
        envs = build_environments(self.config.task, CANDIDATES)
        try:
            envs.begin(seed)
            steps = envs.facts().get("oracle_steps")
            return 0 if steps is None else int(steps.argmax())
        finally:
            envs.close()

    @torch.inference_mode()
    def _play(self, seed: int, number: int, count: int) -> Iterator[Line]:
        envs = build_environments(self.config.task, 1, first=number)
        try:
            with torch.random.fork_rng([]):
                torch.manual_seed(seed + number)
                envs.begin(seed)
                yield from Playing(self, envs).lines(count)
        finally:
            envs.close()


class Playing:
    """One episode."""

    def __init__(self, reader: AgentReader, envs: Environments) -> None:
        self.reader, self.envs, self.policy = reader, envs, reader.model
        self.engine: Any = getattr(envs, "engine", None)
        self.describer = None if self.engine is None else Describer(self.engine)
        out = self.policy(to_row(envs.observation), None)  # a trial step, to see how many spans a layer gives
        element = self.policy.action_head.weight.element_size()
        self.log = MemoryLog(MemoryFacts.of(self.policy.config, out.aux.layers[0].span, out.state, element=element))
        self.state = self.policy.initial_state(1, "hidden")

    def lines(self, count: int) -> Iterator[Line]:
        yield self.header()
        for _ in range(count):
            step, ended = self.step()
            yield step
            if ended:
                return

    def header(self) -> Line:
        task = self.reader.config.task
        about = f"An agent plays {task.env}. {about_world(task.env)} Each step is one observation."
        about = " ".join(filter(None, [about, LEGENDS.get(getattr(self.engine, "name", ""))]))
        return {
            **{"kind": "header", "version": VERSION, "name": self.reader.name, "task": task.kind, "about": about},
            **{"vocabulary": "symbols", **self.log.facts.header()},
        }

    def step(self) -> tuple[Line, bool]:
        step: Line = {"kind": "step", "i": self.log.position, "token": self.log.position, **self._seen(), "bits": None}
        out = self.policy(to_row(self.envs.observation), self.state)
        self.state = out.state
        actions = out.choices.sample()[:, 0]
        heads = self.log.facts.heads
        spans = [spans_by_head(layer.span, heads)[0] for layer in out.aux.layers] if self.log.spans else None
        step |= {"top": self._likeliest(out.choices), "value": round_off(float(out.value[0, 0]))}
        step |= self.log.add(spans, self.state, out.aux.layers)
        hidden = hidden_of(self.state)
        step |= {"hidden": hidden} if hidden is not None else {}
        frame = self.envs.step(actions)
        step |= {"action": self._name(actions[0].tolist()), "reward": round_off(float(frame.reward[0]))}
        ended = bool(frame.ended[0])
        if ended and not bool(frame.success[0].isnan()):
            step["success"] = bool(frame.success[0] > 0)
        return step, ended

    def _seen(self) -> Line:
        if self.describer is None:
            return {"text": f"step {self.log.position}"}
        return {"text": self.describer.words(), "image": picture_of(self.engine)}

    def _likeliest(self, choices: ActionDistribution) -> list[list[Any]]:
        """The likeliest values of the first choice, [text, probability] each; none where all of an action is continuous."""
        if not choices.parts:
            return []
        chances = choices.parts[0][0, 0].exp()
        best, which = chances.topk(min(GUESSES, len(chances)))
        return [[self._name([action]), round_off(chance)] for chance, action in zip(best.tolist(), which.tolist())]

    def _name(self, action: list[float]) -> str:
        if self.engine is None:
            return "action " + ", ".join(f"{x:.3g}" for x in action)
        return name_action(self.engine, int(action[0]))
