"""Which memories of one part of a sequence can be seen from another part, and how they get there: picked, then merged.

A lifetime is fixed when a memory is written, so that this is known before any score is computed. Rows are the units in which
memories live and die together: a row of the batch, or one of its key/value heads where heads have spans of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from expire_span.ops.call import Call, spans_of_heads
from expire_span.ops.rule import NEVER, lifetime


@dataclass(frozen=True)
class Memories:
    """Memories in B x R rows. Each row has K key/value heads, and Q spans a memory: one for each head, or one for all."""

    k: Tensor  # [B, R, K, S, D]
    v: Tensor  # [B, R, K, S, D]
    span: Tensor  # [B, R, Q, S]
    pos: Tensor  # [B, R, S]
    doc: Tensor | None  # [B, R, S], ids of packed documents, with R = 1

    @classmethod
    def of(cls, call: Call) -> Memories:
        (batch, heads, count, _), doc = call.k.shape, call.ids
        span = call.span.unsqueeze(1) if call.span.dim() == 2 else spans_of_heads(call.span, heads)  # [B, 1 or Hkv, S]
        per_head = call.k_pos.dim() == 3 or (span.shape[1] > 1 and doc is None)
        if call.k_pos.dim() == 3 and doc is not None:
            given = f"got documents and k_pos of shape {tuple(call.k_pos.shape)}"
            raise ValueError(f"in a context, documents need positions shared by all heads, {given}; give k_pos [B, S]")
        rows = heads if per_head else 1
        span = span.expand(-1, heads, -1) if per_head else span
        pos = call.k_pos if call.k_pos.dim() == 3 else call.k_pos.expand(batch, count).unsqueeze(1).expand(-1, rows, -1)
        k, v = (x.unflatten(1, (rows, -1)) for x in (call.k, call.v))
        return cls(k, v, span.unflatten(1, (rows, -1)), pos, None if doc is None else doc[1].unsqueeze(1))

    def into(self, call: Call) -> Call:
        """The call with these memories in place of its own."""
        span, rows = self.span.flatten(1, 2), self.pos.shape[1]
        ids = call.ids if self.doc is None or call.ids is None else (call.ids[0], self.doc.squeeze(1))
        pos = self.pos if rows > 1 else self.pos.squeeze(1)
        span = span if span.shape[1] > 1 else span.squeeze(1)
        return replace(call, k=self.k.flatten(1, 2), v=self.v.flatten(1, 2), span=span, k_pos=pos, ids=ids)

    def seen_by(self, queries: Queries, ramp: float, causal: bool) -> Tensor:
        """Which memories are alive for at least one query of a part, [B, R, S] (bool)."""
        first, last = (x.view(-1, 1, 1) for x in (queries.first, queries.last))
        life = lifetime(self.span, ramp).amax(2)
        seen = (self.pos != NEVER) & (self.pos + life > first)
        seen &= (self.pos <= last) if causal else (self.pos - life < last)
        if self.doc is not None and queries.first_doc is not None and queries.last_doc is not None:
            seen &= (self.doc >= queries.first_doc.view(-1, 1, 1)) & (self.doc <= queries.last_doc.view(-1, 1, 1))
        return seen

    def pick(self, where: Tensor) -> Picked:
        """The memories at indices where [n, 3] of row of the batch, row, and memory. Gradients pass."""
        b, r, s = where.unbind(1)
        states = torch.cat([self.k[b, r, :, s], self.v[b, r, :, s]], 1).flatten(1)
        places = [self.pos[b, r, s], *([] if self.doc is None else [self.doc[b, r, s]])]
        return Picked(states, self.span[b, r, :, s], torch.stack(places, 1), b * self.pos.shape[1] + r)


@dataclass(frozen=True)
class Queries:
    """The positions of a part's queries, from the first to the last: [B], or [1] for all rows; and their documents."""

    first: Tensor
    last: Tensor
    first_doc: Tensor | None = None
    last_doc: Tensor | None = None

    @classmethod
    def of(cls, call: Call) -> Queries:
        pos, doc = call.q_pos.view(-1, call.q_pos.shape[-1]), None if call.ids is None else call.ids[0]
        return cls(pos[:, 0], pos[:, -1], None if doc is None else doc[:, 0], None if doc is None else doc[:, -1])


@dataclass(frozen=True)
class Picked:
    """Single memories, one after another: what travels."""

    states: Tensor  # [n, 2 K D], the keys of its heads, then the values
    span: Tensor  # [n, Q]
    places: Tensor  # [n, 1 or 2], position and, with packed documents, the id of the document
    row: Tensor  # [n], the row that each belongs to, of B x R

    def __len__(self) -> int:
        return len(self.row)


def merge(picked: Picked, own: Memories) -> Memories:
    """Memories of other parts and a part's own, in order of position; shorter rows begin with empty slots."""
    return _in_order(_join(lay_out_picked(picked, own), own))


def lay_out_picked(picked: Picked, like: Memories) -> Memories:
    """Picked memories as rectangles, each row in order of position, with empty slots in front."""
    (batch, rows, heads), dim = like.k.shape[:3], like.k.shape[-1]
    order = picked.places[:, 0].argsort(stable=True)
    order = order[picked.row[order].argsort(stable=True)]
    row = picked.row[order]
    counts = torch.bincount(row, minlength=batch * rows)
    width = int(counts.max()) if len(row) else 0
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    slot = row * width + width - counts[row] + rank
    states = _spread(picked.states[order], slot, batch * rows * width)
    k, v = states.view(batch, rows, width, 2, heads, dim).permute(3, 0, 1, 4, 2, 5)
    span = _spread(picked.span[order], slot, batch * rows * width).view(batch, rows, width, like.span.shape[2])
    pos = picked.places.new_full((batch * rows * width,), NEVER).index_copy(0, slot, picked.places[order, 0])
    doc = None
    if like.doc is not None:
        ids = picked.places[order, 1]
        least = int(ids.min()) if len(ids) else 0  # empty slots come first, so that ids never decrease
        doc = ids.new_full((batch * rows * width,), least).index_copy(0, slot, ids).view(batch, rows, width)
    return Memories(k, v, span.transpose(2, 3), pos.view(batch, rows, width), doc)


def _spread(x: Tensor, slot: Tensor, slots: int) -> Tensor:
    """Items [n, c] at their slots [slots, c], zeros elsewhere."""
    return x.new_zeros(slots, x.shape[1]).index_copy(0, slot, x)


def _join(a: Memories, b: Memories) -> Memories:
    doc = None if a.doc is None or b.doc is None else torch.cat([a.doc, b.doc], 2)
    k, v = torch.cat([a.k, b.k], 3), torch.cat([a.v, b.v], 3)
    return Memories(k, v, torch.cat([a.span, b.span], 3), torch.cat([a.pos, b.pos], 2), doc)


def _in_order(x: Memories) -> Memories:
    """The memories of each row by position. They are in order already unless a part carries memories of earlier blocks, or
    queries see later memories too."""
    if bool((x.pos.diff() >= 0).all()):
        return x
    order = x.pos.argsort(dim=2, stable=True)  # [B, R, S]
    of_heads = order[:, :, None, :, None].expand_as(x.k)
    doc = None if x.doc is None else x.doc.gather(2, order)
    span = x.span.gather(3, order.unsqueeze(2).expand_as(x.span))
    return Memories(x.k.gather(3, of_heads), x.v.gather(3, of_heads), span, x.pos.gather(2, order), doc)
