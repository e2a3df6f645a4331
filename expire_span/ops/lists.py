"""Live lists in plain PyTorch: for each chunk of queries, the indices of the memories that any of them can see.

A memory belongs to the lists of all chunks from the one in which it is born to the one in which its ramp ends. A dead memory
stays dead, so a chunk's list is made from the list before it: the survivors, followed by the newly born. The work for all lists
is therefore proportional to their total length. Short chunks waste less work, since fewer of their listed memories are dead for
most of their queries. Several consecutive chunks can share one `LiveList` with a row for each of them, so that short chunks do
not need one call of PyTorch each.

Lists are computed from integers only. Ages are integers, so only the whole steps of a lifetime matter, and a position plus a
number of whole steps is exact however large the position is. A list may hold a few dead memories, whose mask is 0; it never
lacks a living one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from .rule import lifetime, whole_steps


@dataclass
class LiveList:
    """The memories that R consecutive chunks of C queries can see, for N rows of inputs. There are N x R lists of n entries."""

    start: int
    stop: int
    """The chunks hold the queries [start, stop)."""
    chunks: int
    """Number R of chunks, all of one size. In dimension 0 of `index`, the chunks of one row of inputs follow each other."""
    index: Tensor | None
    """Indices of memories [N*R, n]. Padding of shorter lists holds any index, with `valid` False. None if `window` is set."""
    window: tuple[int, int] | None
    """The range of memories [first, end), used instead of `index` for one chunk whose lists are the same range in all rows."""
    valid: Tensor | None
    """False for padding, [N*R, n]; None if there is no padding."""
    full: int
    """Number of leading entries that have full weight for every query of their chunk, and so need no mask."""

    @property
    def size(self) -> int:
        """Number of queries in a chunk, C."""
        return (self.stop - self.start) // self.chunks

    def queries(self, x: Tensor) -> Tensor:
        """Take these chunks' part of a tensor with one entry per query: [N, K, G, T, ..] -> [N*R, K, G*C, ..]."""
        x = x[:, :, :, self.start : self.stop]
        if self.chunks == 1:
            return x.flatten(2, 3)
        return x.unflatten(3, (self.chunks, -1)).movedim(3, 1).flatten(0, 1).flatten(2, 3)

    def put(self, rows: Tensor, part: Tensor) -> None:
        """The inverse of `queries`: write [N*R, K, G*C, ..] into [N, K, G, T, ..]."""
        part = part.unflatten(2, (rows.shape[2], -1)).unflatten(0, (-1, self.chunks))  # [N, R, K, G, C, ..]
        into = rows[:, :, :, self.start : self.stop].unflatten(3, (self.chunks, -1))
        into.copy_(part.movedim(1, 3))

    def of_queries(self, rows: Tensor) -> Tensor:
        """One number of each query of these chunks, [N, T] -> [N*R, C]."""
        return rows[:, self.start : self.stop].unflatten(1, (self.chunks, -1)).flatten(0, 1)

    def take(self, rows: Tensor) -> Tensor:
        """One number of each listed memory, [N, S] -> [N*R, n]."""
        if self.window is not None:
            return rows[:, self.window[0] : self.window[1]]
        assert self.index is not None
        return _pick(rows, self.index)

    def add(self, rows: Tensor, update: Tensor) -> None:
        """The gradient of `take`: add update [N*R, n] to the listed memories of rows [N, S], which are contiguous."""
        if self.window is not None:
            rows[:, self.window[0] : self.window[1]] += update
            return
        assert self.index is not None
        rows.view(-1).index_add_(0, _flat(rows, self.index), update.reshape(-1).to(rows.dtype))

    def take_states(self, states: Tensor) -> Tensor:
        """Keys or values of the listed memories, [N, K, S, D] -> [N*R, K, n, D]; a view of a window."""
        if self.window is not None:
            return states[:, :, self.window[0] : self.window[1]]
        found = states.reshape(-1, states.shape[3]).index_select(0, self._states(states))
        return found.view(-1, states.shape[1], self.count, states.shape[3])

    def add_states(self, states: Tensor, update: Tensor) -> None:
        """The gradient of `take_states`; states are contiguous."""
        if self.window is not None:
            states[:, :, self.window[0] : self.window[1]] += update
            return
        flat = states.view(-1, states.shape[3])
        flat.index_add_(0, self._states(states), update.reshape(-1, states.shape[3]).to(states.dtype))

    @property
    def count(self) -> int:
        """Number of entries in a list, n."""
        return self.window[1] - self.window[0] if self.window is not None else cast(Tensor, self.index).shape[1]

    def _states(self, states: Tensor) -> Tensor:
        """The listed memories of every head as rows of [N*K*S, D], in the order [N, R, K, n]."""
        rows, heads, memories, _ = states.shape
        first = torch.arange(rows * heads, device=states.device).view(rows, 1, heads, 1) * memories
        return (cast(Tensor, self.index).view(rows, self.chunks, 1, self.count) + first).view(-1)


def _flat(rows: Tensor, index: Tensor) -> Tensor:
    """Indices [N*R, n] into rows [N, S, ...] as indices into its N*S entries, [N*R*n]."""
    if rows.shape[0] > 1:
        first = torch.arange(rows.shape[0], device=rows.device) * rows.shape[1]
        index = index + first.repeat_interleave(index.shape[0] // rows.shape[0]).unsqueeze(1)
    return index.reshape(-1)


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """Entries of rows [N, S, ...] at [N*R, n] -> [N*R, n, ...]."""
    flat = rows.reshape(-1, *rows.shape[2:]).index_select(0, _flat(rows, index))
    return flat.reshape(*index.shape, *rows.shape[2:])


def live_lists(
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    causal: bool,
    include_self: bool,
    chunk: int,
    together: int = 1,
    documents: tuple[Tensor, Tensor] | None = None,
) -> Iterator[LiveList]:
    """The live lists of all chunks, in order; each holds up to `together` chunks. span, k_pos [N, S], q_pos [N, T].

    documents: ids of the queries [N, T] and of the memories [N, S].
    """
    count = q_pos.shape[1]
    if count == 0 or k_pos.shape[1] == 0:
        return
    q_pos, k_pos, span = q_pos.contiguous(), k_pos.contiguous(), span.contiguous()
    starts = list(range(0, count, chunk))
    stops = [min(s + chunk, count) for s in starts]
    ends = [s - 1 for s in stops]
    first, last = (q_pos[:, at].contiguous() for at in (starts, ends))  # [N, chunks]
    life = lifetime(span, ramp)
    dies = torch.searchsorted(first, k_pos + life) - 1  # last chunk that still sees it
    # In encoders queries also see later memories, from less than `life` steps before these on.
    born = torch.searchsorted(last, k_pos if causal else k_pos - life + 1)
    whole = _whole_chunks(span, life, first, last, k_pos, causal, include_self)
    if documents is not None:
        of_queries, of_memories = (ids.contiguous() for ids in documents)
        _keep_in_documents(born, dies, whole, of_queries[:, starts], of_queries[:, ends], of_memories)
    groups = _groups(count, chunk, together)
    candidates = _sweep(born, dies, groups) if causal else _everything(born, len(groups))
    for (begin, end), (index, valid) in zip(groups, candidates):
        ids = torch.arange(begin, end, device=born.device)
        index, valid = _of_each_chunk(index, valid, born, dies, ids)
        if index.shape[1]:  # chunks that see nothing have no list: their queries' outputs are zero
            yield _arrange(starts[begin], stops[end - 1], index, valid, whole, ids)


def _groups(count: int, chunk: int, together: int) -> list[tuple[int, int]]:
    """Ranges [begin, end) of chunks that share a `LiveList`; a shorter last chunk has one of its own."""
    whole = count // chunk
    groups = [(begin, min(begin + together, whole)) for begin in range(0, whole, together)]
    return groups + ([(whole, whole + 1)] if count % chunk else [])


def _whole_chunks(
    span: Tensor, life: Tensor, first: Tensor, last: Tensor, k_pos: Tensor, causal: bool, include_self: bool
) -> Tensor:
    """The range of chunks [a, b) in which a memory has full weight for every query, [N, S, 2]; empty for encoders."""
    if not causal:
        return torch.zeros(*k_pos.shape, 2, dtype=torch.int64, device=k_pos.device)
    begins = torch.searchsorted(first, k_pos, right=not include_self)
    oldest = torch.minimum(whole_steps(torch.floor(span.detach())), life - 1)  # the oldest age of full weight
    ends = torch.searchsorted(last, k_pos + oldest, right=True)
    return torch.stack([begins, ends], -1)


def _keep_in_documents(born: Tensor, dies: Tensor, whole: Tensor, first: Tensor, last: Tensor, k_doc: Tensor) -> None:
    """Narrow these ranges of chunks, in place: to those with queries of a memory's document, `whole` to those with no others.

    first, last [N, chunks]: documents of the chunks' first and last queries.
    """
    torch.maximum(born, torch.searchsorted(last, k_doc), out=born)
    torch.minimum(dies, torch.searchsorted(first, k_doc, right=True) - 1, out=dies)
    begins, ends = whole.unbind(-1)
    begins.copy_(torch.maximum(begins, torch.searchsorted(first, k_doc)))
    ends.copy_(torch.minimum(ends, torch.searchsorted(last, k_doc, right=True)))


def _sweep(born: Tensor, dies: Tensor, groups: list[tuple[int, int]]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each group of chunks, the survivors of the group before and the newly born: indices and which are valid, [N, m]."""
    rows, chunks = born.shape[0], groups[-1][1]
    ends = torch.searchsorted(born, torch.arange(chunks, device=born.device).expand(rows, -1).contiguous(), right=True)
    edges = torch.cat([ends.new_zeros(rows, 1), ends], 1)
    low, high = edges.amin(0).tolist(), edges.amax(0).tolist()
    index = born.new_zeros(rows, 0)
    valid = torch.zeros(rows, 0, dtype=torch.bool, device=born.device)
    for begin, end in groups:
        new = torch.arange(low[begin], high[end], device=born.device).expand(rows, -1)
        is_new = (new >= edges[:, begin : begin + 1]) & (new < edges[:, end : end + 1])
        index, valid = torch.cat([index, new], 1), torch.cat([valid, is_new], 1)
        index, valid = _squeeze(index, valid & (dies.gather(1, index) >= begin))
        yield index, valid


def _everything(born: Tensor, groups: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The same for encoders: all memories are candidates for every group."""
    everything = torch.arange(born.shape[1], device=born.device).expand(born.shape[0], -1)
    for _ in range(groups):
        yield everything, torch.ones_like(everything, dtype=torch.bool)


def _of_each_chunk(index: Tensor, valid: Tensor, born: Tensor, dies: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """From a group's memories [N, m], select those that each of its chunks sees: [N*R, n]."""
    seen = (born.gather(1, index).unsqueeze(1) <= ids[:, None]) & (dies.gather(1, index).unsqueeze(1) >= ids[:, None])
    seen = seen & valid.unsqueeze(1)  # [N, R, m]
    if len(ids) == 1 and bool(seen.all()):
        return index, valid
    return _squeeze(index.unsqueeze(1).expand_as(seen).flatten(0, 1), seen.flatten(0, 1))


def _squeeze(index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Drop invalid entries and keep the order of the others; shorter rows are padded with invalid entries at the end."""
    if index.shape[0] == 1:
        index = index[valid].unsqueeze(0)
        return index, torch.ones_like(index, dtype=torch.bool)
    width = int(valid.sum(1).max()) if valid.numel() else 0
    order = (~valid).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return index.gather(1, order), valid.gather(1, order)


def _arrange(start: int, stop: int, index: Tensor, valid: Tensor, whole: Tensor, ids: Tensor) -> LiveList:
    """Build the `LiveList` of the chunks `ids`: memories of full weight first, or a plain range where they are consecutive."""
    ranges, chunk = _pick(whole, index), ids.repeat(whole.shape[0]).unsqueeze(1)  # [N*R, n, 2], [N*R, 1]
    is_full = (ranges[..., 0] <= chunk) & (chunk < ranges[..., 1]) & valid
    fully = int(is_full.sum(1).min())
    everywhere = bool(valid.all())
    if len(ids) == 1 and everywhere:
        first, last = int(index[0, 0]), int(index[0, -1])
        if last - first + 1 == index.shape[1] and bool((index == index[:1]).all()):
            lead = int(is_full.all(0).to(torch.uint8).cumprod(0).sum())
            return LiveList(start, stop, 1, None, (first, last + 1), None, lead)
    order = (~is_full).to(torch.uint8).argsort(dim=1, stable=True)
    index, valid = index.gather(1, order), valid.gather(1, order)
    return LiveList(start, stop, len(ids), index, None, None if everywhere else valid, fully)
