"""A layer's attention for a batch as an engine describes it: rows of tokens, lengths of requests, and their blocks.

`BlockAttention` is what the backend of engine/backend.py calls, without the engine: tests call it with hand-made batches.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.rule import FOREVER

from .slots import BlockSlots

logger = logging.getLogger("vllm.expire_span")


@dataclass
class BlockMetadata:
    """A batch: requests that add one token, all together, and chunks of several tokens, one by one."""

    rows: Tensor
    """Rows of the batch's tokens [n] that are single tokens of requests."""
    blocks: Tensor
    """Their requests' blocks [n]."""
    now: Tensor
    """Their positions [n]."""
    chunks: list[tuple[int, int, int, int]]
    """First row, row after the last, position of the first, and block."""
    begun: Tensor
    """Blocks of requests that begin, or begin again after preemption."""


def read_batch(described: Any, device: Any) -> BlockMetadata:
    """`described`: vLLM's CommonAttentionMetadata, or whatever has its query_start_loc_cpu, seq_lens and block_table_tensor."""
    lengths, blocks = described.seq_lens.tolist(), described.block_table_tensor[:, 0].tolist()
    return read_metadata(described.query_start_loc_cpu.tolist(), lengths, blocks, device)


def read_metadata(edges: list[int], lengths: list[int], blocks: list[int], device: Any) -> BlockMetadata:
    """edges: rows at which requests begin and end; lengths: tokens of each request, these included."""
    singles, chunks, begun = [], [], []
    for first, after, length, block in zip(edges, edges[1:], lengths, blocks):
        count = after - first
        if count == 0:
            continue
        if length == count:
            begun.append(block)
        if count == 1:
            singles.append((first, block, length - 1))
        else:
            chunks.append((first, after, length - count, block))
    rows, where, now = torch.tensor(singles, dtype=torch.int64).view(-1, 3).t().contiguous().to(device)
    return BlockMetadata(rows, where, now, chunks, torch.tensor(begun, dtype=torch.int64).to(device))


class BlockAttention:
    """One layer's attention. `set_up` gives it what the adapter says, once the model knows its layers."""

    slots: BlockSlots
    keep_first = 0
    evict = False
    name = ""
    _cache: int | None = None
    _lost: Tensor | None = None
    _seen: Tensor | None = None
    _warned = False

    def set_up(self, slots: BlockSlots, keep_first: int, evict: bool, name: str) -> None:
        self.slots, self.keep_first, self.evict, self.name = slots, keep_first, evict, name

    @property
    def evicted(self) -> int:
        """Living memories that were evicted because their head was full. The count is on the device, and waited for here."""
        return 0 if self._lost is None else int(self._lost)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, span: Tensor, cache: Tensor, m: BlockMetadata, output: Tensor
    ) -> Tensor:
        """query [rows, Hq, D], key and value [rows, Hkv, D], span [rows, Hkv] -> output [rows, Hq, D]."""
        if self._cache != cache.data_ptr():
            self.slots.bind(cache.flatten(1)[:, : self.slots.block_bytes // cache.element_size()])
            self._cache = cache.data_ptr()
        if len(m.begun):
            self.slots.clear(m.begun)
        if len(m.rows):
            q, k, v, new = (x[m.rows] for x in (query, key, value, span))
            new = torch.where((m.now < self.keep_first).unsqueeze(1), FOREVER, new)
            y, lost = self.slots.step(q, k, v, new, m.blocks, m.now, evict=self.evict)
            output[m.rows] = self._mark(y, lost)
        for first, after, start, block in m.chunks:
            new = span[first:after]
            kept = min(max(self.keep_first - start, 0), len(new))
            if kept:
                new = torch.cat([torch.full_like(new[:kept], FOREVER), new[kept:]])
            q, k, v = (x[first:after] for x in (query, key, value))
            y, lost = self.slots.chunk(q, k, v, new, block, start, evict=self.evict)
            output[first:after] = y
            output[after - 1 : after] = self._mark(y[-1:], lost)
        return output

    def _mark(self, y: Tensor, lost: Tensor) -> Tensor:
        """Outputs of requests [n, ..] whose memories found no slot become NaN, and so do their logits, by which the scheduler
        learns of it. Where such memories are evicted they are counted instead."""
        if not self.evict:
            return y.masked_fill((lost > 0).view(-1, 1, 1), torch.nan)
        self._count(lost.sum())
        return y

    def _count(self, lost: Tensor) -> None:
        """Add to the count on the device, and warn once. The host waits for nothing: on a GPU it looks at a copy which may
        arrive late, so that the warning may come some steps after the first eviction."""
        self._lost = lost if self._lost is None else self._lost + lost
        if self._warned:
            return
        if self._seen is None:
            self._seen = torch.zeros((), dtype=lost.dtype, pin_memory=lost.is_cuda)
        self._seen.copy_(self._lost, non_blocking=True)
        self._warned = bool(self._seen)
        if self._warned:
            logger.warning(
                "Expire-Span: a head of %s has more memories than its %d slots; those with the fewest steps left are evicted",
                self.name,
                self.slots.widest,
            )
