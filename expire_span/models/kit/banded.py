"""Attention to the last `window` entries, block by block: no mask is larger than block x (window + block).

Queries are cut into blocks, and each block reads one contiguous range of keys: the `window` entries before it and its own.
All blocks run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.store import NEVER

from .attention import attend

LEAST_BLOCK = 32
"""Smallest number of queries in a block, however small the window."""


class Extra(NamedTuple):
    """G entries that every later query reads beside its window: k, v [B, H, G, D], pos [B, 1, G] with NEVER where empty."""

    k: Tensor
    v: Tensor
    pos: Tensor


@dataclass(frozen=True)
class BlockCut:
    """How a sequence is cut into N blocks of `block` queries. Each block reads `older` entries before it, and its own."""

    count: int
    """Number of queries T of the whole sequence."""
    block: int
    older: int

    @property
    def width(self) -> int:
        """Number of entries that a block reads."""
        return self.older + self.block

    @property
    def missing(self) -> int:
        """Number of padding entries that complete the last block."""
        return -self.count % self.block

    def queries(self, x: Tensor) -> Tensor:
        """Cut queries into blocks: [B, H, T, D] -> [B, H, N, block, D]."""
        return F.pad(x, (0, 0, 0, self.missing)).unflatten(2, (-1, self.block))

    def stretches(self, x: Tensor) -> Tensor:
        """The range of keys or values that each block reads: [B, H, older + T, D] -> [B, H, N, width, D]."""
        return F.pad(x, (0, 0, 0, self.missing)).unfold(2, self.width, self.block).transpose(-1, -2)

    def numbers(self, x: Tensor, empty: int) -> tuple[Tensor, Tensor]:
        """One number per entry, x [B, h, older + T], for the queries [B, h, N, block, 1] and keys [B, h, N, 1, width] of
        blocks.

        empty: the number of padding entries.
        """
        x = F.pad(x, (0, self.missing), value=empty)
        of_queries = x[..., self.older :].unflatten(-1, (-1, self.block)).unsqueeze(-1)
        return of_queries, x.unfold(-1, self.width, self.block).unsqueeze(-2)

    def distance(self, device: torch.device) -> Tensor:
        """How many entries each key of a block lies before each query, [block, width]; negative for later keys."""
        place = torch.arange(self.width, device=device)
        return place[self.older :, None] - place


def banded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    *,
    window: int,
    group: Tensor | None = None,
    chunks: bool = False,
    dilation: int = 1,
    extra: Extra | None = None,
    relative_keys: Tensor | None = None,
    core: Callable[..., Tensor] = attend,
) -> Tensor:
    """Each query reads the last `window` entries, its own included.

    Args:
        q: [B, H, T, D].
        k, v: [B, H, S + T, D]: up to `window` older entries, then the queries' own.
        pos: positions of k [B, 1 or H, S + T]; NEVER marks an empty entry.
        group: integers with the shape of pos, where S = window: a query reads only entries of its own group. None: one group.
        chunks: instead of the last `window` entries, read the chunk of `window` entries that holds the query, up to the query,
            and the whole chunk before it.
        dilation: distance in steps between neighbouring entries; decides which extra entries lie in the window already.
        extra: entries that are read beside the window.
        core: the attention within a block, called like `attend`; its result may be wider than v.

    Returns y [B, H, T, D].
    """
    cut, k, v, pos = _plan_cut(q, k, v, pos, window, chunks)
    queries, keys, values = cut.queries(q), cut.stretches(k), cut.stretches(v)
    q_pos, k_pos = cut.numbers(pos, NEVER)
    distance = cut.distance(q.device)
    seen = _in_band(distance, window, chunks) & (k_pos != NEVER)
    if group is not None:
        of_queries, of_keys = cut.numbers(group, -1)
        seen = seen & (of_queries == of_keys)
    seen = seen | (distance == 0)  # padding reads itself, so that no row of the mask is empty
    if extra is not None:
        keys, values, seen, k_pos = _prepend_extra(keys, values, seen, q_pos, k_pos, extra, window * dilation, dilation)
    y = core(*(_fold(x) for x in (queries, keys, values, seen, q_pos - k_pos)), relative_keys)  # [B * N, H, block, D]
    return y.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)[:, :, : cut.count]


def _plan_cut(q, k, v, pos, window: int, chunks: bool) -> tuple[BlockCut, Tensor, Tensor, Tensor]:
    """Choose the cut; k, v and pos are padded in front to a whole window of older entries where there are several blocks."""
    count, older = q.shape[2], k.shape[2] - q.shape[2]
    block = window if chunks else min(count, max(window, LEAST_BLOCK))
    if older < window and (chunks or count > block):
        k, v = (F.pad(x, (0, 0, window - older, 0)) for x in (k, v))
        pos, older = F.pad(pos, (window - older, 0), value=NEVER), window
    return BlockCut(count, block, older), k, v, pos


def _in_band(distance: Tensor, window: int, chunks: bool) -> Tensor:
    """Which keys of a block a query may read, by their distance in entries."""
    return (distance >= 0) if chunks else (distance >= 0) & (distance < window)


def _fold(x: Tensor) -> Tensor:
    """[B, H, N, ..] -> [B * N, H, ..]."""
    return x.transpose(1, 2).flatten(0, 1)


def _prepend_extra(k, v, seen, q_pos, k_pos, extra: Extra, extent: int, dilation: int):
    """Put the extra entries before each block's keys, except those that the window holds already."""
    blocks = k.shape[2]
    k = torch.cat([extra.k.to(k.dtype).unsqueeze(2).expand(-1, -1, blocks, -1, -1), k], 3)
    v = torch.cat([extra.v.to(v.dtype).unsqueeze(2).expand(-1, -1, blocks, -1, -1), v], 3)
    e_pos = extra.pos[:, :, None, None, :]  # [B, 1, 1, 1, G]
    age = q_pos - e_pos
    outside = (age >= extent) | (age % dilation != 0)
    fresh = (e_pos != NEVER) & (age >= 0) & outside
    seen = torch.cat([fresh.expand(*seen.shape[:-1], -1), seen], -1)
    return k, v, seen, torch.cat([e_pos.expand(*k_pos.shape[:-1], -1), k_pos], -1)
