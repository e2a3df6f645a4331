"""Control experiments: does an agent act by what it remembers, or by something else?

Each control changes the memories of an agent while it plays, and predicts what must then happen if it acts by memory:
- forget: all memories are deleted at every step; where memory is needed, success must fall to chance.
- forget_expiring, forget_recurrent: of a hybrid, only the layers that learn spans are emptied, or only the others; what is lost
  is what the agent had from those layers.
- delete: the memories that show a fact that is still needed are deleted once it is out of sight; success must fall to chance.
- swap: all memories are replaced by those of a twin episode that differs only in the cue's colour; the agent must take the door
  that is right for its twin (Corridor with two colours).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from expire_span.models.policy import Policy
from expire_span.models.state import map_tensors
from expire_span.settings.agent import EnvTask
from expire_span.store import NEVER, HiddenMemory, trim_states
from expire_span.train.agent_evaluation import BuildControl, Control
from expire_span.train.build_environments import build_environments
from expire_span.train.environments import to_tensor

ControlName = Literal["none", "forget", "forget_expiring", "forget_recurrent", "delete", "swap"]


class Forget(Control):
    """Empties some layers before every step: all, those that learn spans ("expiring"), or the others ("recurrent")."""

    def __init__(self, policy: Policy, which: str = "") -> None:
        self.blocks = policy.layers()
        expiring = [hasattr(block.mixer, "span_predictor") for block in self.blocks]
        self.chosen = [not which or is_expiring == (which == "expiring") for is_expiring in expiring]
        if not any(self.chosen):
            raise ValueError(f"the control forget_{which} needs {which} layers, and this agent has none")

    def change(self, state: list[Any], steps: Tensor, facts: dict[str, Tensor]) -> list[Any]:
        every = torch.ones_like(steps, dtype=torch.bool)
        parts = zip(self.blocks, state, self.chosen)
        return [block.reset_rows(part, every) if chosen else part for block, part, chosen in parts]


class Delete(Control):
    """Deletes memories of shown facts. Needs an environment that reports which fact an observation shows, and a memory system
    whose state is a `HiddenMemory`."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.shown = torch.zeros(count, 0, dtype=torch.bool, device=device)  # [B, steps]: whether a step showed a fact

    def change(self, state: list[Any], steps: Tensor, facts: dict[str, Tensor]) -> list[Any]:
        showing = _fact_of(facts) >= 0
        width = int(steps.max()) + 1
        if width > self.shown.shape[1]:
            more = self.shown.new_zeros(len(steps), width - self.shown.shape[1])
            self.shown = torch.cat([self.shown, more], 1)
        self.shown[torch.arange(len(steps), device=steps.device), steps] = showing
        return [_without(part, self.shown, steps, ~showing) for part in trim_states(state)]


def _without(part: Any, shown: Tensor, steps: Tensor, rows: Tensor) -> Any:
    """A layer's state without the memories, in the given rows, of steps that showed a fact."""
    memory = _slots_of(part)
    born = steps[:, None] + memory.pos  # positions count from the next step, so the newest memory has -1
    stored = memory.pos != NEVER
    gone = stored & rows[:, None] & shown.gather(1, born.clamp_min(0)) if born.numel() else stored
    hidden, pos = memory.hidden.masked_fill(gone.unsqueeze(-1), 0), memory.pos.masked_fill(gone, NEVER)
    return {**part, "memory": replace(memory, hidden=hidden, pos=pos)}


def _slots_of(part: Any) -> HiddenMemory:
    memory = part.get("memory") if isinstance(part, dict) else None
    if not isinstance(memory, HiddenMemory):
        raise ValueError(f"this control needs memories in slots, got a state of {type(memory or part).__name__}")
    return memory


class Swap(Control):
    """The twin environment shows the same episode with the other colour as cue, and takes the agent's own actions."""

    def __init__(self, policy: Policy, task: EnvTask, count: int, device: torch.device, seed: int) -> None:
        twin = build_environments(task, count, device)
        engine: Any = getattr(twin, "engine", None)
        if engine is None or engine.name != "corridor" or engine.config.colours != 2:
            raise ValueError(f"the control swap needs a corridor with two colours, got {task.env}")
        self.policy, self.twin, self.engine = policy, twin, engine
        self.twin.begin(seed)
        self._flip(torch.ones(count, dtype=torch.bool, device=device))
        self.state = policy.initial_state(count, "hidden")
        self.swapped = torch.zeros(count, dtype=torch.bool, device=device)

    def _flip(self, rows: Tensor) -> None:
        """Give the episodes that have just begun the other colour as cue."""
        arrays, cue = self.engine.arrays, self.engine.first_cue
        flipped = rows.cpu().numpy() if arrays.is_numpy else rows
        self.engine.first_cue = arrays.where(flipped, 1 - cue, cue)
        self.twin.observation = {n: to_tensor(x, self.twin.device) for n, x in self.engine.observe().items()}

    def change(self, state: list[Any], steps: Tensor, facts: dict[str, Tensor]) -> list[Any]:
        now = (_fact_of(facts) < 0) & ~self.swapped  # the cue has just gone out of sight
        self.swapped = self.swapped | now
        state = choose_rows(self.state, state, now) if bool(now.any()) else state
        seen = {name: x.unsqueeze(1) for name, x in self.twin.observation.items()}
        self.state = self.policy(seen, self.state).state
        return state

    def follow(self, actions: Tensor, ended: Tensor) -> None:
        out = self.twin.step(actions)
        # The twin's episode ends at the same step as the agent's, since doors and lengths are the same.
        assert bool((out.ended == ended).all())
        self.swapped = self.swapped & ~ended
        if bool(ended.any()):
            self._flip(ended)
            self.state = self.policy.reset_rows(self.state, ended)


def choose_rows(new: list[Any], old: list[Any], rows: Tensor) -> list[Any]:
    """The state whose rows come from `new` where `rows` [B] says so, and from `old` elsewhere."""
    out = []
    for a, b in zip(trim_states(new), trim_states(old)):
        most = max(_slots_of(x).pos.shape[1] for x in (a, b))
        first, second = (_widen(_slots_of(x), most) for x in (a, b))
        hidden = torch.where(rows[:, None, None], first.hidden, second.hidden)
        out.append(
            {**b, "memory": replace(second, hidden=hidden, pos=torch.where(rows[:, None], first.pos, second.pos))}
        )
    return map_tensors(out, torch.Tensor.detach)


def _widen(memory: HiddenMemory, width: int) -> HiddenMemory:
    """The same memories with empty slots in front."""
    room = width - memory.pos.shape[1]
    hidden = torch.nn.functional.pad(memory.hidden, (0, 0, room, 0))
    return replace(memory, hidden=hidden, pos=torch.nn.functional.pad(memory.pos, (room, 0), value=NEVER))


def _fact_of(facts: dict[str, Tensor]) -> Tensor:
    if "fact" not in facts:
        raise ValueError("this control needs an environment whose info tells which fact an observation shows")
    return facts["fact"]


def choose_control(name: ControlName) -> BuildControl | None:
    """What `evaluate_agent` takes for the control of this name."""
    if name.startswith("forget"):
        which = name.removeprefix("forget").removeprefix("_")
        return lambda policy, task, count, device, seed: Forget(policy, which)
    if name == "delete":
        return lambda policy, task, count, device, seed: Delete(count, device)
    return Swap if name == "swap" else None
