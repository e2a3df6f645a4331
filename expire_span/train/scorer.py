"""The decoder with its loss: the module that is trained and evaluated, and that DDP or FSDP wraps for several processes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.tasks.contract import Batch


class Scorer(nn.Module):
    """`scorer(x, y, mask, state, fresh, remember) -> (sums, state, bytes held)`.

    x, y, mask [B, T]: tokens, targets, and which positions are scored. `sums` holds tensors on the device: nll (summed over
    scored positions), correct, span_loss, and live and span per layer. `fresh` [B] (bool) marks rows whose memory is emptied
    first; `remember` says whether memory is carried.
    """

    _no_split_modules = ("Block",)  # the unit in which FSDP shards the model
    decoder: Decoder

    def __init__(self, decoder: Decoder, precision: str = "fp32") -> None:
        super().__init__()
        self.decoder, self.precision = decoder, precision

    def forward(
        self, x: Tensor, y: Tensor, mask: Tensor, state: Any, fresh: Tensor | None = None, remember: bool = True
    ) -> tuple[dict[str, Tensor], Any, int]:
        with torch.autocast(x.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext():
            keep = "nothing" if not remember else "hidden" if self.training else "kv"
            logits, state, aux = self.decoder(x, state, fresh, keep)
        logits = logits.float()  # [B, T, V]
        nll = F.cross_entropy(logits.flatten(0, 1), y.masked_fill(~mask, 0).flatten(), reduction="none").view_as(mask)
        sums = {"nll": torch.where(mask, nll, 0).sum(), "span_loss": aux.loss.float()}
        with torch.no_grad():
            sums["correct"] = ((logits.argmax(-1) == y) & mask).sum()
            sums["live"] = aux.live.float()
            sums["span"] = torch.stack([_mean_span(part.span, sums["live"]) for part in aux.layers])
        return sums, state, aux.bytes_held


def _mean_span(span: Tensor | None, like: Tensor) -> Tensor:
    """Mean span of a layer; zero for systems without spans."""
    return like.new_zeros(()) if span is None else span.float().mean()


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    return Batch(batch.x[start:stop], batch.y[start:stop], batch.mask[start:stop], batch.fresh[start:stop])


def start_of(batch: Batch, state: Any, device: torch.device) -> tuple[Any, Tensor | None]:
    """The state with which a batch begins, and which rows to empty first; (None, None) if all rows are fresh."""
    if state is None or not bool(batch.fresh.any()):
        return state, None
    return (None, None) if bool(batch.fresh.all()) else (state, batch.fresh.to(device))


def score(
    scorer: nn.Module, batch: Batch, state: Any, device: torch.device, remember: bool = True
) -> tuple[dict[str, Tensor], Any, int]:
    """Run a scorer on one batch, which is on the CPU, as tasks give it."""
    state, fresh = start_of(batch, state, device)
    x, y, mask = (part.to(device, non_blocking=True) for part in (batch.x, batch.y, batch.mask))
    return scorer(x, y, mask, state, fresh, remember)
