"""Steps of a stream by ordinary calls of the model, for models whose memories have no static shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expire_span.models.mixer import MixerAux
from expire_span.models.state import bytes_of, pack, select_rows, unpack
from expire_span.sampling import Sampling
from expire_span.store import ExpiringMemory

from .engines import Engine
from .interface import Prefilled, StreamModel


class Group(NamedTuple):
    """Rows whose prompts were read as one batch, and which share a state since then."""

    rows: list[int]
    state: list[Any]
    """One part per layer, with a batch row for each of `rows`."""
    live: Tensor
    """Number of living memories of each layer and row, [layers, rows], by the layers' last reports."""


class PlainEngine(Engine):
    """Calls the model for every step, once for each group of rows."""

    def __init__(self, model: StreamModel, rows: int) -> None:
        super().__init__(model, rows)
        self.groups: list[Group] = []

    def _load(self, rows: list[int], prompts: Prefilled) -> None:
        self._drop(rows)
        self.groups.append(_group(rows, prompts))

    def _drop(self, rows: Sequence[int]) -> None:
        gone, kept = set(rows), []
        for group in self.groups:
            stay = [n for n, row in enumerate(group.rows) if row not in gone]
            if len(stay) < len(group.rows):
                group = _choose(group, [group.rows[n] for n in stay], stay)
            kept += [group] if stay else []
        self.groups = kept

    def advance(self, sampling: Sampling | None, generator: torch.Generator | None = None) -> None:
        if sampling is not None:
            self._draw(sampling, generator)
        self.feed(self.tokens.unsqueeze(1))

    def feed(self, tokens: Tensor) -> None:
        tokens, groups, after = tokens.to(self.device), [], self.logits.clone()
        for rows, state, _ in self.groups:
            where = torch.tensor(rows, device=self.device)
            read = self.model.prefill(tokens[where], state)
            after[where] = read.logits.float()
            groups.append(_group(rows, read))
        # Everything changes at the end, so that a step that was interrupted, as by Ctrl-C, can be taken again.
        self.groups, self.logits, self.position = groups, after, self.position + tokens.shape[1]

    def row_state(self, row: int) -> list[Any]:
        rows, state, _ = next(group for group in self.groups if row in group.rows)
        return select_rows(state, torch.tensor([rows.index(row)], device=self.device))

    @property
    def live(self) -> Tensor:
        found = torch.zeros(self.model.layers, self.rows, device=self.device)
        for rows, state, reported in self.groups:
            for n, part in enumerate(state):
                memory = _memory_of(part)
                count = reported[n] if memory is None else memory.live(part["position"]).float()
                found[n, rows] = count.mean(1) if count.dim() == 2 else count
        return found

    @property
    def evicted(self) -> int:
        memories = [_memory_of(part) for group in self.groups for part in group.state]
        return sum(int(m.evicted.sum()) for m in memories if m is not None and m.evicted is not None)

    @property
    def bytes_held(self) -> int:
        return sum(bytes_of(group.state) for group in self.groups)

    def selected(self, rows: list[int]) -> PlainEngine:
        other = PlainEngine(self.model, len(rows))
        other.logits.copy_(self.logits[torch.tensor(rows, device=self.device)])
        other.position, other.active = self.position, [self.active[row] for row in rows]
        for group in self.groups:
            new = [n for n, row in enumerate(rows) if row in group.rows]
            if new:
                other.groups.append(_choose(group, new, [group.rows.index(rows[n]) for n in new]))
        return other

    def packed(self) -> tuple[dict[str, Tensor], Any]:
        tensors, skeleton = pack([[list(rows), state] for rows, state, _ in self.groups], "groups")
        live = {f"live{n}": group.live for n, group in enumerate(self.groups)}
        return {"logits": self.logits, **live, **tensors}, {"groups": skeleton, "position": self.position}

    def unpacked(self, tensors: dict[str, Tensor], meta: Any) -> None:
        tensors = {name: x.to(self.device) for name, x in tensors.items()}
        self.logits.copy_(tensors["logits"])
        for n, (rows, state) in enumerate(unpack(tensors, meta["groups"])):
            self.groups.append(Group(rows, state, tensors[f"live{n}"]))
        self.position = meta["position"]


def _group(rows: list[int], read: Prefilled) -> Group:
    return Group(rows, read.state, _count_reported(read.state, read.reports, len(rows), read.logits.device))


def _choose(group: Group, rows: list[int], places: list[int]) -> Group:
    """The batch rows of a group at `places`, as the stream's rows with the numbers `rows`."""
    picked = torch.tensor(places, dtype=torch.int64, device=group.live.device)
    return Group(rows, select_rows(group.state, picked), group.live.index_select(1, picked))


def _memory_of(part: Any) -> ExpiringMemory | None:
    """The store in a layer's state in which living memories can be counted row by row."""
    memory = part.get("memory") if isinstance(part, dict) else None
    return memory if isinstance(memory, ExpiringMemory) else None


def _count_reported(state: list[Any], reports: Sequence[MixerAux], rows: int, device: torch.device) -> Tensor:
    """Living memories of every layer and row by the layers' reports, which are means over rows; NaN where `live` counts them in
    the state when it is asked, and where a layer reports none."""
    counts = torch.full((len(state), rows), torch.nan, device=device)
    for n, (part, report) in enumerate(zip(state, reports)):
        if _memory_of(part) is None and report.live is not None:
            counts[n] = report.live
    return counts
