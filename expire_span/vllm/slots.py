"""Slots in blocks of an engine's cache: one block holds all memories of one request in one layer, for the request's whole life.

A block is cut up by head: key/value head h owns slots bounds[h] to bounds[h + 1], so heads may have different numbers of slots.
A slot holds a key, a value, the span (float32) and the position of its memory; an empty slot has a span of minus infinity.
Deletion is reuse: a memory that no later query sees leaves its slot to the next newcomer (ops/rule.py says which those are).
The query of a step reads the slots and its own new memory, and only what later queries can see is stored. So a head needs as
many slots as it has memories that are alive for the next query.

On a GPU, steps of one token of each request are one kernel; everything else is plain PyTorch, batched over requests and heads.
There is no engine here: tests call it with hand-made blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from expire_span.ops import expire_attention
from expire_span.ops.rule import NEVER, exact_span, is_alive
from expire_span.ops.slots import attend_slots, slot_kernel_serves
from expire_span.store.slots import DEAD

ALIGNMENT = 64
"""Bytes of a block are a multiple of this, so that every field can be viewed in its own dtype."""
META_BYTES = 8
"""Bytes of a slot's span and position."""


class Fields(NamedTuple):
    """Views of a layer's blocks: k, v [blocks, total, D]; span [blocks, total] in float32, pos [blocks, total] in int32."""

    k: Tensor
    v: Tensor
    span: Tensor
    pos: Tensor


class BlockSlots:
    """One layer's slots; `capacity` gives those of each key/value head."""

    fields: Fields

    def __init__(
        self, capacity: Sequence[int], head_dim: int, *, ramp: float, scale: float, dtype: torch.dtype
    ) -> None:
        self.capacity, self.head_dim, self.ramp, self.scale, self.dtype = tuple(capacity), head_dim, ramp, scale, dtype
        self.heads, self.total, self.widest = len(self.capacity), sum(self.capacity), max(self.capacity)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.bytes_for(self.total)

    def bytes_for(self, slots: int) -> int:
        """Bytes of a block with so many slots."""
        need = slots * (2 * self.head_dim * self.dtype.itemsize + META_BYTES)
        return -(-need // ALIGNMENT) * ALIGNMENT

    def bind(self, cache: Tensor) -> None:
        """Take the layer's blocks, [blocks, block_bytes in elements of the cache's dtype]; they need not lie side by side."""
        assert cache.dtype == self.dtype and cache.shape[1] * cache.element_size() == self.block_bytes, cache.shape
        content = self.total * self.head_dim
        k, v = (cache[:, n * content : (n + 1) * content].unflatten(1, (self.total, -1)) for n in (0, 1))
        meta = cache[:, 2 * content : 2 * content + META_BYTES * self.total // cache.element_size()]
        span = meta[:, : meta.shape[1] // 2].view(torch.float32)
        self.fields = Fields(k, v, span, meta[:, meta.shape[1] // 2 :].view(torch.int32))
        sizes = torch.tensor(self.capacity, device=cache.device)
        self.bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
        slot = torch.arange(self.widest, device=cache.device)
        self.exists = slot < sizes.unsqueeze(1)
        """Which places of the rectangle [heads, widest] are slots, and below, which slot of the block each place is."""
        self.place = self.bounds[:-1].long().unsqueeze(1) + torch.minimum(slot, (sizes - 1).clamp_min(0).unsqueeze(1))

    def clear(self, blocks: Tensor) -> None:
        """Empty these blocks. Keys and values are overwritten too: what a former request left may be infinite or NaN."""
        for x, value in zip(self.fields, (0, 0, DEAD, 0)):
            x[blocks] = value

    def live(self, blocks: Tensor, now: Tensor) -> Tensor:
        """Memories that the query at `now` [n] sees in each block [n], by head: [n, heads]."""
        return is_alive(self._remaining(blocks, now), self.ramp).sum(-1)

    def _remaining(self, blocks: Tensor, now: Tensor) -> Tensor:
        """Span - age of every slot for queries at `now`, [n, heads, widest]; minus infinity where there is no memory."""
        where = blocks.view(-1, 1, 1), self.place
        age = now.view(-1, 1, 1) - self.fields.pos[where]
        return (self.fields.span[where] - age.float()).masked_fill_(~self.exists, DEAD)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, span: Tensor, blocks: Tensor, now: Tensor, *, evict: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One token of each of n requests: q [n, Hq, D], k, v [n, heads, D], span [n, heads], blocks and positions `now` [n].

        Returns y [n, Hq, D] and, by request, how many memories found no slot [n]. With `evict` these are the ones with the
        fewest steps left, else newcomers.
        """
        if slot_kernel_serves("auto", q):
            from expire_span.ops.triton import triton_block_step

            held = self.fields, self.bounds
            return triton_block_step(
                q, k, v, span.float(), blocks, now, *held, ramp=self.ramp, scale=self.scale, evict=evict
            )
        return self.plain_step(q, k, v, span, blocks, now, evict=evict)

    def plain_step(
        self, q: Tensor, k: Tensor, v: Tensor, span: Tensor, blocks: Tensor, now: Tensor, *, evict: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`step` in plain PyTorch, which defines what the kernel of ops/triton/block_slots.py does."""
        left = self._remaining(blocks, now)
        width = self._width(is_alive(left, self.ramp))
        where = blocks.view(-1, 1, 1), self.place[:, :width]
        keys = torch.cat([self.fields.k[where], k.unsqueeze(2).to(self.dtype)], 2)
        values = torch.cat([self.fields.v[where], v.unsqueeze(2).to(self.dtype)], 2)
        new = span.unsqueeze(-1)
        remaining = torch.cat([left[..., :width], new], -1)
        y = attend_slots(q, keys.to(q.dtype), values.to(q.dtype), remaining, ramp=self.ramp, scale=self.scale)
        return y, self.store(k.unsqueeze(2), v.unsqueeze(2), new, now.view(-1, 1), blocks, now + 1, evict=evict)

    def _width(self, alive: Tensor) -> int:
        """How many slots of each head are read: on a CPU up to the last living one; elsewhere all, so that no host waits."""
        if alive.device.type != "cpu":
            return self.widest
        used = alive.flatten(0, -2).any(0).nonzero()
        return int(used[-1, 0]) + 1 if len(used) else 0

    def chunk(
        self, q: Tensor, k: Tensor, v: Tensor, span: Tensor, block: int, start: int, *, evict: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The n tokens from position `start` of one request: q [n, Hq, D], k, v [n, heads, D], span [n, heads].

        Returns y [n, Hq, D] and how many memories found no slot [1], as `step` does.
        """
        count, device = len(q), q.device
        blocks, first = torch.tensor([block], device=device), torch.tensor([start], device=device)
        alive = is_alive(self._remaining(blocks, first), self.ramp)
        where = block, self.place[:, : self._width(alive)]
        alive = alive[0, :, : where[1].shape[1]]
        pos = torch.where(alive, self.fields.pos[where].long(), NEVER)
        pos, order = pos.sort(-1)  # the operator wants positions that do not fall
        keys, values, spans = (x[where] for x in self.fields[:3])
        wide = order.unsqueeze(-1).expand_as(keys)
        at = torch.arange(start, start + count, device=device)
        new_k, new_v, new_span = k.transpose(0, 1), v.transpose(0, 1), span.t().float()
        y = expire_attention(
            q.transpose(0, 1).unsqueeze(0),
            torch.cat([keys.gather(1, wide).to(q.dtype), new_k.to(q.dtype)], 1).unsqueeze(0),
            torch.cat([values.gather(1, wide).to(q.dtype), new_v.to(q.dtype)], 1).unsqueeze(0),
            torch.cat([spans.gather(1, order).masked_fill(pos == NEVER, 0), new_span], 1).unsqueeze(0),
            at,
            torch.cat([pos, at.expand(self.heads, -1)], 1).unsqueeze(0),
            ramp=self.ramp,
            scale=self.scale,
            check_values=False,
        )
        lost = self.store(
            new_k.unsqueeze(0),
            new_v.unsqueeze(0),
            new_span.unsqueeze(0),
            at.unsqueeze(0),
            blocks,
            first + count,
            evict=evict,
        )
        return y[0].transpose(0, 1), lost

    def store(
        self, k: Tensor, v: Tensor, span: Tensor, pos: Tensor, blocks: Tensor, now: Tensor, *, evict: bool
    ) -> Tensor:
        """Put what the query at `now` [n] and later ones can see into slots: k, v [n, heads, m, D], span [n, heads, m], pos
        [n, m]. Returns the number of memories that were lost, by request [n]."""
        left = self._remaining(blocks, now)
        left_new = exact_span(span) - (now.unsqueeze(1) - pos).unsqueeze(1).float()
        stays, come = is_alive(left, self.ramp), is_alive(left_new, self.ramp)
        lost = (stays.sum(-1) + come.sum(-1) - self.exists.sum(-1)).clamp_min(0).sum(-1)
        if evict and (blocks.device.type != "cpu" or bool(lost.any())):
            stays, come = self._strongest(left, left_new, stays, come, pos, blocks)
        free = self.exists & ~stays
        rank = come.cumsum(-1) - 1
        fits = come & (rank < free.sum(-1, keepdim=True))
        row, head, item = fits.nonzero(as_tuple=True)
        slot = self.place[head, _first(free, come.shape[-1])[row, head, rank[row, head, item]]]
        block = blocks[row]
        for field, x in zip(self.fields, (k, v, span, pos.unsqueeze(1).expand_as(span))):
            field[block, slot] = x[row, head, item].to(field.dtype)
        return lost

    def _strongest(
        self, left: Tensor, left_new: Tensor, stays: Tensor, come: Tensor, pos: Tensor, blocks: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the living, as many as a head has slots: those with the most steps left, and of equals the youngest. What is
        evicted gets an empty slot's span."""
        born = self.fields.pos[blocks.view(-1, 1, 1), self.place]
        every = torch.cat([left, left_new], -1).masked_fill(~torch.cat([stays, come], -1), DEAD)
        birth = torch.cat([born, pos.unsqueeze(1).expand_as(left_new).to(born.dtype)], -1)
        order = birth.argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, every.gather(-1, order).argsort(dim=-1, descending=True, stable=True))
        rank = torch.empty_like(order).scatter_(
            -1, order, torch.arange(every.shape[-1], device=order.device).expand_as(order)
        )
        kept = rank < self.exists.sum(-1).view(1, -1, 1)
        old, new = kept.split([left.shape[-1], left_new.shape[-1]], -1)
        row, head, item = (stays & ~old).nonzero(as_tuple=True)
        self.fields.span[blocks[row], self.place[head, item]] = DEAD
        return stays & old, come & new


def _first(free: Tensor, count: int) -> Tensor:
    """The indices of the first `count` free slots of each head, [n, heads, at most count]; any others where there are fewer."""
    if count == 1:
        return free.to(torch.int8).argmax(-1, keepdim=True)
    return free.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[..., :count]
