"""Measurements of the steps since the last line of metrics: they stay on the device, and the host reads them once per line."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

HEAD = ("nll", "correct", "span_loss", "weight", "grad_norm")


@dataclass
class StepMetrics:
    """One row of numbers per step and process: HEAD, then live and span per layer, then the nll of each micro-batch."""

    layers: int
    rows: list[Tensor] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    """Number of scored positions of each step, over all processes."""
    units: list[int] = field(default_factory=list)
    """Number of units over which the score of each step is a mean: bytes of text, else scored positions."""
    _table: Tensor | None = None
    """Cached result of `read`; None once rows were added."""

    def add(self, pieces: list[dict[str, Tensor]], weight: Tensor, grad_norm: Tensor, count: int, units: int) -> None:
        """Add one step, given the sums of each of its micro-batches."""
        nll = torch.stack([p["nll"].detach() for p in pieces])
        head = [
            nll.sum(),
            sum(p["correct"] for p in pieces),
            torch.stack([p["span_loss"].detach() for p in pieces]).mean(),
        ]
        head = torch.stack([torch.as_tensor(x, device=nll.device).float() for x in (*head, weight, grad_norm)])
        layers = [torch.stack([p[name] for p in pieces]).mean(0) for name in ("live", "span")]
        self.rows.append(torch.cat([head, *layers, nll]))
        self.counts.append(count)
        self.units.append(units)
        self._table = None

    @property
    def newest_live(self) -> Tensor:
        """Mean living memories per query in the newest step of this process, averaged over layers."""
        return self.rows[-1][len(HEAD) : len(HEAD) + self.layers].mean()

    @property
    def newest_nll(self) -> Tensor:
        """Summed negative log-likelihood of the newest step of this process."""
        return self.rows[-1][0]

    def read(self, accelerator: Accelerator) -> Tensor:
        """All rows of all processes on the host, [processes, steps, numbers]."""
        if self._table is None:
            table: Any = accelerator.gather(torch.stack(self.rows).unsqueeze(0))
            self._table = table.double().cpu()
        assert self._table is not None
        return self._table

    def summary(self, accelerator: Accelerator) -> dict[str, Any]:
        """The means over the steps since the last line, as one line of metrics holds them."""
        table = self.read(accelerator)
        total = dict(zip(HEAD, table[..., : len(HEAD)].sum((0, 1)).tolist()))
        per_layer = table[..., len(HEAD) : len(HEAD) + 2 * self.layers].mean((0, 1)).tolist()
        steps = table.shape[0] * table.shape[1]
        line = {"nll": total["nll"], "correct": total["correct"], "count": sum(self.counts)}
        line["units"] = sum(self.units)
        line |= {"span_loss": total["span_loss"] / steps, "span_weight": float(table[0, -1, HEAD.index("weight")])}
        line |= {"grad_norm": total["grad_norm"] / steps}
        return line | {"live": per_layer[: self.layers], "span": per_layer[self.layers :]}

    def find_fault(self, accelerator: Accelerator) -> tuple[int, int, int, float] | None:
        """The first step that is not finite: (steps before the newest, process, micro-batch or -1, its value)."""
        table = self.read(accelerator)
        parts = table[..., len(HEAD) + 2 * self.layers :]
        norms = table[..., HEAD.index("grad_norm")]
        for index in range(table.shape[1]):
            for process, values in enumerate(parts[:, index].tolist()):
                for micro, value in enumerate(values):
                    if not math.isfinite(value):
                        return table.shape[1] - 1 - index, process, micro, value
            if not bool(norms[:, index].isfinite().all()):
                return table.shape[1] - 1 - index, 0, -1, float(norms[0, index])
        return None

    def clear(self) -> None:
        self.rows.clear()
        self.counts.clear()
        self.units.clear()
        self._table = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "rows": torch.stack(self.rows) if self.rows else None,
            "counts": list(self.counts),
            "units": list(self.units),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = [] if state["rows"] is None else list(state["rows"].unbind())
        self.counts = list(state["counts"])
        self.units = list(state.get("units", self.counts))  # older checkpoints counted positions only
        self._table = None


def divide_measurements(saved: list[dict[str, Any]], processes: int, layers: int) -> dict[str, Any]:
    """What each of `processes` holds in place of those that saved these `state_dict`s: sums are divided evenly, means kept."""
    if saved[0]["rows"] is None:
        return saved[0]
    table = torch.stack([state["rows"].double() for state in saved])  # [processes, steps, numbers]
    whole = table.mean(0)
    of_sums = [HEAD.index("nll"), HEAD.index("correct"), *range(len(HEAD) + 2 * layers, whole.shape[1])]
    whole[:, of_sums] = table[..., of_sums].sum(0) / processes
    return {**saved[0], "rows": whole.to(saved[0]["rows"].dtype)}
