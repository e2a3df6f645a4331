"""What the processes of a run hold, divided anew where the run goes on with another number of processes.

Weights, optimizers and the place in the data are those of the whole run. Each process's own are the memories of its rows (with
a context, of one part of them), the measurements since the last line of metrics, and its random generators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.state import count_rows, select_rows
from expire_span.ops.rule import NEVER
from expire_span.store import HiddenMemory, Store
from expire_span.store.order import take_slots

from .step_metrics import divide_measurements


@dataclass(frozen=True)
class Layout:
    """How rows are divided among processes: neighbours share rows, and each group of them has rows of its own."""

    processes: int
    sharing: int
    """Number of processes that share each row."""

    @property
    def groups(self) -> int:
        return self.processes // self.sharing


def regroup(workers: list[dict[str, Any]], old: Layout, new: Layout, place: int, layers: int) -> dict[str, Any]:
    """What process `place` of the new layout holds. workers: what each process of the old layout held, in order.

    Every new process continues the random numbers of the first old one, which all drew alike where no rows were shared.
    """
    states = _states_of(workers, old, new, place)
    window = divide_measurements([worker["window"] for worker in workers], new.processes, layers)
    return {**workers[0], "states": states, "window": window}


def _states_of(workers: list[dict[str, Any]], old: Layout, new: Layout, place: int) -> list[Any]:
    """The states of process `place`, one for each micro-batch. Rows are in the order (group, micro-batch, row)."""
    micro = len(workers[0]["states"])
    passes = []
    for group in range(old.groups):
        sharing = workers[group * old.sharing : (group + 1) * old.sharing]
        passes += [join_shards([worker["states"][n] for worker in sharing]) for n in range(micro)]
    if passes[0] is None:
        return [None] * micro
    whole = join_rows(passes)
    count = count_rows(whole)
    assert count is not None
    rows = count // (new.groups * micro)
    group, shard = divmod(place, new.sharing)
    starts = [(group * micro + n) * rows for n in range(micro)]
    found = [select_rows(whole, torch.arange(start, start + rows)) for start in starts]
    return [take_shard(state, shard, new.sharing) for state in found]


def join_rows(states: list[Any]) -> Any:
    """States of the same kind as one state that has the rows of all, in order."""
    first = states[0]
    if isinstance(first, Tensor):
        return torch.cat(states) if first.dim() else first
    if isinstance(first, HiddenMemory):
        return _join_memories(states)
    if isinstance(first, Store):
        raise ValueError(f"rows of a store of kind {first.layout_name} cannot be divided among other processes")
    if isinstance(first, dict):
        return {key: join_rows([state[key] for state in states]) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(join_rows(list(parts)) for parts in zip(*states, strict=True))
    return first


def _join_memories(stores: list[HiddenMemory]) -> HiddenMemory:
    """The rows of all stores; narrower ones begin with more empty slots."""
    most = max(store.pos.shape[1] for store in stores)
    empty = [most - store.pos.shape[1] for store in stores]
    hidden = torch.cat([F.pad(store.hidden, (0, 0, n, 0)) for store, n in zip(stores, empty)])
    pos = torch.cat([F.pad(store.pos, (n, 0), value=NEVER) for store, n in zip(stores, empty)])
    return _stored(hidden, pos, torch.cat([store.evicted for store in stores]))


def join_shards(states: list[Any]) -> Any:
    """The states of processes that share rows as that of one process: memories are sorted by their positions."""
    return states[0] if len(states) == 1 else _in_stores(states, _merge_memories)


def _merge_memories(stores: list[HiddenMemory]) -> HiddenMemory:
    hidden, pos = (torch.cat([getattr(store, name) for store in stores], 1) for name in ("hidden", "pos"))
    order = pos.argsort(dim=1, stable=True)
    evicted = torch.stack([store.evicted for store in stores]).sum(0)
    return _stored(take_slots(hidden, order), pos.gather(1, order), evicted)


def take_shard(state: Any, shard: int, sharing: int) -> Any:
    """The part of a state that one of `sharing` processes holds. Any part may lie with any of them: they read each other's."""

    def part_of(stores: list[HiddenMemory]) -> HiddenMemory:
        (store,) = stores
        hidden, pos = (x.tensor_split(sharing, 1)[shard] for x in (store.hidden, store.pos))
        return _stored(hidden, pos, store.evicted if shard == 0 else torch.zeros_like(store.evicted))

    return state if sharing == 1 else _in_stores([state], part_of)


def _stored(hidden: Tensor, pos: Tensor, evicted: Tensor) -> HiddenMemory:
    """A store that `trim_states` cuts to its living memories."""
    return HiddenMemory(hidden.contiguous(), pos.contiguous(), evicted, (pos != NEVER).sum(-1), pos.shape[1])


def _in_stores(states: list[Any], of_stores: Any) -> Any:
    """Nested states of one shape with `of_stores` applied to the stores at each place; other values must be equal."""
    first = states[0]
    if isinstance(first, HiddenMemory):
        return of_stores(states)
    if isinstance(first, dict):
        return {key: _in_stores([state[key] for state in states], of_stores) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_in_stores(list(parts), of_stores) for parts in zip(*states, strict=True))
    return first
