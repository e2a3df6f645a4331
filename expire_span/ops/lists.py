"""Live lists in plain PyTorch: for each chunk of queries, the indices of the memories that any of them can see.

A memory belongs to the lists of all chunks from the one in which it is born to the one in which its ramp ends. A dead memory
stays dead, so the list of a chunk is made from the list before: its survivors, then the newly born. The work for all lists is
therefore proportional to their total length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MARGIN = 1e-2
"""Steps by which lists keep memories longer than needed: rounding must never drop a living one. The mask of a dead one is 0."""


@dataclass
class LiveList:
    """The memories of one chunk. The first `full` of them have full weight for every query of the chunk."""

    start: int
    stop: int
    """The chunk is queries [start, stop)."""
    index: Tensor | None
    """Indices of memories [N, n]; shorter rows are padded with any others, where `valid` is False. None with `window`."""
    window: tuple[int, int] | None
    """The memories as one range of S, if all rows have the same ones and these are consecutive."""
    valid: Tensor | None
    """Which entries are no padding [N, n], or None if there is no padding."""
    full: int
    """How many leading entries need no mask."""

    def take(self, rows: Tensor) -> Tensor:
        """Gather the listed memories of rows [N, S, ...] -> [N, n, ...]."""
        if self.window is not None:
            return rows[:, self.window[0] : self.window[1]]
        assert self.index is not None
        if rows.shape[0] == 1:
            return rows[0].index_select(0, self.index[0]).unsqueeze(0)
        offset = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
        flat = rows.reshape(-1, *rows.shape[2:]).index_select(0, (self.index + offset).reshape(-1))
        return flat.reshape(*self.index.shape, *rows.shape[2:])

    def add(self, rows: Tensor, update: Tensor) -> None:
        """The gradient of `take`: add update [N, n, ...] to the listed memories of rows [N, S, ...], which are contiguous."""
        if self.window is not None:
            rows[:, self.window[0] : self.window[1]] += update
            return
        assert self.index is not None
        offset = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1) * rows.shape[1]
        flat = rows.view(-1, *rows.shape[2:])
        flat.index_add_(0, (self.index + offset).reshape(-1), update.reshape(-1, *rows.shape[2:]).to(rows.dtype))


def live_lists(
    span: Tensor, q_pos: Tensor, k_pos: Tensor, *, ramp: float, causal: bool, include_self: bool, chunk: int
) -> Iterator[LiveList]:
    """The lists of all chunks in order. span, k_pos [N, S], q_pos [N, T]."""
    count = q_pos.shape[1]
    if count == 0 or k_pos.shape[1] == 0:
        return
    q_pos, k_pos, span = q_pos.contiguous(), k_pos.contiguous(), span.contiguous()
    starts = list(range(0, count, chunk))
    stops = [min(s + chunk, count) for s in starts]
    first = q_pos[:, starts].contiguous()  # [N, chunks]
    last = q_pos[:, [s - 1 for s in stops]].contiguous()
    reach = span.detach().double() + (ramp + _MARGIN)
    base = q_pos[:, :1]
    death = (k_pos - base).double() + reach
    dies = torch.searchsorted((first - base).double(), death) - 1  # last chunk that still sees it
    born = torch.searchsorted(last, k_pos) if causal else _first_chunk(k_pos - base, reach, last - base)
    whole = _whole_chunks(span, first, last, k_pos, causal, include_self, dies)
    sweep = _sweep_causal if causal else _sweep_all
    for c, (index, valid) in enumerate(sweep(born, dies, len(starts))):
        yield _arrange(starts[c], stops[c], index, valid, whole, c)


def _first_chunk(k_pos: Tensor, reach: Tensor, last: Tensor) -> Tensor:
    """Encoders see memories that lie ahead: the first chunk whose last query is at most `reach` steps before the memory."""
    return torch.searchsorted(last.double(), k_pos.double() - reach)


def _whole_chunks(
    span: Tensor, first: Tensor, last: Tensor, k_pos: Tensor, causal: bool, include_self: bool, dies: Tensor
) -> Tensor:
    """[N, S, 2]: the range of chunks [a, b) in which a memory has full weight for every query; causal only."""
    if not causal:
        return torch.zeros(*k_pos.shape, 2, dtype=torch.int64, device=k_pos.device)
    base = first[:, :1]
    begins = torch.searchsorted(first, k_pos, right=not include_self)
    full_until = (k_pos - base).double() + span.detach().double() - _MARGIN
    ends = torch.searchsorted((last - base).double(), full_until, right=True)
    return torch.stack([begins, ends], -1)


def _sweep_causal(born: Tensor, dies: Tensor, chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Survivors of the previous list plus the newly born, chunk by chunk."""
    rows = born.shape[0]
    ends = torch.searchsorted(born, torch.arange(chunks, device=born.device).expand(rows, -1).contiguous(), right=True)
    edges = torch.cat([ends.new_zeros(rows, 1), ends], 1)
    low, high = edges.amin(0).tolist(), edges.amax(0).tolist()
    index = born.new_zeros(rows, 0)
    valid = torch.zeros(rows, 0, dtype=torch.bool, device=born.device)
    for c in range(chunks):
        new = torch.arange(low[c], high[c + 1], device=born.device).expand(rows, -1)
        is_new = (new >= edges[:, c : c + 1]) & (new < edges[:, c + 1 : c + 2])
        index, valid = torch.cat([index, new], 1), torch.cat([valid, is_new], 1)
        index, valid = _squeeze(index, valid & (dies.gather(1, index) >= c))
        yield index, valid


def _sweep_all(born: Tensor, dies: Tensor, chunks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Encoders: any memory can enter and leave at any chunk."""
    everything = torch.arange(born.shape[1], device=born.device).expand(born.shape[0], -1)
    for c in range(chunks):
        yield _squeeze(everything, (born <= c) & (dies >= c))


def _squeeze(index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Drop invalid entries and keep the order of the others; shorter rows are padded with invalid entries at the end."""
    if index.shape[0] == 1:
        index = index[valid].unsqueeze(0)
        return index, torch.ones_like(index, dtype=torch.bool)
    width = int(valid.sum(1).max()) if valid.numel() else 0
    order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return index.gather(1, order), valid.gather(1, order)


def _arrange(start: int, stop: int, index: Tensor, valid: Tensor, whole: Tensor, c: int) -> LiveList:
    """The list of chunk c: memories of full weight first, or a plain range if the memories are consecutive."""
    if index.shape[1] == 0:
        return LiveList(start, stop, index, None, None, 0)
    ranges = whole.gather(1, index.unsqueeze(-1).expand(-1, -1, 2))
    is_full = (ranges[..., 0] <= c) & (c < ranges[..., 1]) & valid
    fully = int(is_full.sum(1).min())
    everywhere = bool(valid.all())
    first, last = int(index[0, 0]), int(index[0, -1])
    if everywhere and last - first + 1 == index.shape[1] and bool((index == index[:1]).all()):
        lead = int(is_full.all(0).to(torch.uint8).cumprod(0).sum())
        return LiveList(start, stop, None, (first, last + 1), None, lead)
    order = (~is_full).to(torch.uint8).argsort(dim=1, stable=True)
    index, valid = index.gather(1, order), valid.gather(1, order)
    return LiveList(start, stop, index, None, None if everywhere else valid, fully)
