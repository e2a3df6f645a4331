"""Evaluation: loss, score, living memories and bytes, with memory carried through the whole split."""

from __future__ import annotations

import itertools
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.models.decoder import Decoder
from expire_span.settings.run import BackboneConfig, DecoderConfig
from expire_span.tasks.contract import Batch, Split, Task

from .scorer import Scorer, score


@dataclass(frozen=True)
class Result:
    split: str
    loss: float
    """Mean negative log-likelihood of the scored positions, in nats."""
    score: float
    score_name: str
    tokens: int
    """Number of tokens read, over all rows."""
    rows: int
    """Number of batch rows; bytes divided by it are those of one row."""
    live: list[float]
    """Mean living memories per query, one number per layer."""
    peak_live: list[float]
    """Largest mean of `live` over any one block, one number per layer."""
    span: list[float]
    """Mean span in steps, one number per layer; zero for systems without spans."""
    live_share: float
    """Living memories divided by all tokens since a row's last reset, both summed over queries and layers."""
    mean_bytes: float
    """Mean bytes that the state of all rows and layers occupied after a block."""
    peak_bytes: int
    full_bytes: float
    """Mean bytes that the keys and values of all tokens would occupy if nothing were ever deleted."""
    text: dict[str, Any] = field(default_factory=dict)
    """For text read by a tokenizer, the scores per token and per byte; else empty."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "text" or value}

    def per_row(self) -> dict[str, Any]:
        """The same for display: bytes are those of one row, which their names say."""
        told = self.to_dict()
        for name in ("mean_bytes", "peak_bytes", "full_bytes"):
            told[f"{name}_per_row"] = told.pop(name) / max(self.rows, 1)
        return told


def memory_bytes(config: BackboneConfig, element: int = 4) -> int:
    """Bytes of one memory's key and value in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * element


def evaluate(
    decoder: Decoder,
    task: Task,
    split: Split = "valid",
    *,
    batch: int,
    block: int,
    batches: int | None = None,
    seed: int = 0,
    precision: str = "fp32",
) -> Result:
    """Score a decoder on a split (or its first `batches` batches), memory carried from block to block."""
    scorer = Scorer(decoder, precision)
    stream = task.stream(split, batch=batch, block=block, seed=seed)
    most = None if batches is None else min(batches, sys.maxsize)  # islice takes no larger number
    return evaluate_stream(scorer, decoder.config, task, split, itertools.islice(stream, most))


@torch.no_grad()
def evaluate_stream(scorer: nn.Module, config: DecoderConfig, task: Task, split: str, stream: Any) -> Result:
    """The same for a `Scorer`, which may be wrapped for several processes, and any iterable of batches."""
    was_training = scorer.training
    scorer.eval()
    device = next(scorer.parameters()).device
    totals = _Totals(config)
    state = None
    try:
        for batch in stream:
            sums, state, held = score(scorer, batch, state, device)
            totals.add(batch, sums, held)
    finally:
        scorer.train(was_training)
    return totals.result(task, split)


class _Totals:
    """Running sums on the device; the host waits for them once, at the end."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.sums: list[Tensor] = []
        self.weights: list[tuple[int, float]] = []  # tokens and mean memories seen, per block
        self.held: list[int] = []
        self.full: list[float] = []
        self.scored, self.units, self.rows = 0, 0, 0
        self.seen: Tensor | None = None  # tokens since the last reset, per row

    def add(self, batch: Batch, sums: dict[str, Tensor], held: int) -> None:
        rows, length = batch.x.shape
        self.rows = rows
        before = torch.zeros(rows)
        if self.seen is not None and not bool(batch.fresh.all()):
            before = torch.where(batch.fresh, 0, self.seen)
        paper = getattr(self.config.mixer, "paper", None)
        own = 1 if paper is None or paper.include_self else 0
        self.weights.append((rows * length, float(before.mean()) + (length - 1) / 2 + own))
        self.seen = before + length
        self.full.append(float(self.seen.sum()) * memory_bytes(self.config) * self.config.layers)
        self.sums.append(torch.cat([sums["nll"].view(1), sums["correct"].view(1), sums["live"], sums["span"]]))
        self.held.append(held)
        self.scored += int(batch.mask.sum())
        self.units += batch.units

    def result(self, task: Task, split: str) -> Result:
        if not self.sums:
            raise ValueError(f"the {split} split gave no batch; use a smaller batch or block")
        table = torch.stack(self.sums).double().cpu()
        tokens = torch.tensor([float(n) for n, _ in self.weights], dtype=torch.float64)
        seen = torch.tensor([mean for _, mean in self.weights], dtype=torch.float64)
        layers = (table.shape[1] - 2) // 2
        live, span = table[:, 2 : 2 + layers], table[:, 2 + layers :]
        share = tokens / tokens.sum()
        nll, correct = float(table[:, 0].sum()), float(table[:, 1].sum())
        of_text = getattr(task, "text_scores", None)
        return Result(
            split=split,
            loss=nll / max(self.scored, 1),
            score=task.score_of(nll, correct, self.units),
            score_name=task.score.name,
            tokens=int(tokens.sum()),
            rows=self.rows,
            live=(share @ live).tolist(),
            peak_live=live.amax(0).tolist(),
            span=(share @ span).tolist(),
            live_share=float((share @ live).mean() / max(float(share @ seen), 1e-9)),
            mean_bytes=sum(self.held) / len(self.held),
            peak_bytes=max(self.held),
            full_bytes=sum(self.full) / len(self.full),
            text=of_text(split, nll, self.scored, self.units) if of_text is not None else {},
        )
