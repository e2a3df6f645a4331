"""Attention to the last `window` entries, block by block: no mask larger than block x (window + block) per block.

Queries are cut into blocks; each block reads one contiguous stretch of keys. All blocks run as one batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.attention import attend
from expire_span.store import NEVER

LEAST_BLOCK = 32
"""Queries are handled in blocks of at least so many, however small the window."""


class Extra(NamedTuple):
    """Entries that every later query reads besides its window: k, v [B, H, G, D], pos [B, 1, G], NEVER where empty."""

    k: Tensor
    v: Tensor
    pos: Tensor


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
        group: integers like pos, with a whole window of older entries: a query reads only entries of its own group.
        chunks: read the whole own chunk of `window` entries (up to the query) and the whole chunk before it.
        dilation: distance in steps between neighbouring entries; says which extra entries the window holds already.
        extra: entries outside the band.
        core: what attends within a block, called like `attend`; its result may be wider than v.

    Returns y [B, H, T, D].
    """
    count = q.shape[2]
    block = window if chunks else min(count, max(window, LEAST_BLOCK))
    older = k.shape[2] - count
    if older < window and (chunks or count > block):  # every later block has a whole window behind it
        k, v = (F.pad(x, (0, 0, window - older, 0)) for x in (k, v))
        pos, older = F.pad(pos, (window - older, 0), value=NEVER), window
    short = -count % block
    q, k, v = (F.pad(x, (0, 0, 0, short)) for x in (q, k, v))
    pos = F.pad(pos, (0, short), value=NEVER)
    width = older + block
    q = q.unflatten(2, (-1, block))  # [B, H, N, block, D]
    k, v = (x.unfold(2, width, block).transpose(-1, -2) for x in (k, v))  # [B, H, N, width, D]
    k_pos = pos.unfold(-1, width, block).unsqueeze(-2)  # [B, h, N, 1, width]
    q_pos = pos[..., older:].unflatten(-1, (-1, block)).unsqueeze(-1)  # [B, h, N, block, 1]
    distance = torch.arange(older, width, device=q.device)[:, None] - torch.arange(width, device=q.device)
    near = (distance >= 0) if chunks else (distance >= 0) & (distance < window)
    seen = near & (k_pos != NEVER)
    if group is not None:
        group = F.pad(group, (0, short), value=-1)
        theirs = group.unfold(-1, width, block).unsqueeze(-2)
        seen = seen & (theirs == group[..., older:].unflatten(-1, (-1, block)).unsqueeze(-1))
    seen = seen | (distance == 0)  # padding reads itself, so that no row is empty
    if extra is not None:
        k, v, seen, k_pos = _with_extra(k, v, seen, q_pos, k_pos, extra, window, dilation)
    folded = (_fold(x) for x in (q, k, v, seen, q_pos - k_pos))
    y = core(*folded, relative_keys)  # [B * N, H, block, D]
    y = y.unflatten(0, (q.shape[0], -1)).transpose(1, 2).flatten(2, 3)
    return y[:, :, :count]


def _fold(x: Tensor) -> Tensor:
    """[B, H, N, ..] -> [B * N, H, ..]."""
    return x.transpose(1, 2).flatten(0, 1)


def _with_extra(k, v, seen, q_pos, k_pos, extra: Extra, window: int, dilation: int):
    """Put the extra entries before each block's stretch; those that its window holds are not read twice."""
    blocks = k.shape[2]
    k = torch.cat([extra.k.to(k.dtype).unsqueeze(2).expand(-1, -1, blocks, -1, -1), k], 3)
    v = torch.cat([extra.v.to(v.dtype).unsqueeze(2).expand(-1, -1, blocks, -1, -1), v], 3)
    e_pos = extra.pos[:, :, None, None, :]  # [B, 1, 1, 1, G]
    age = q_pos - e_pos
    outside = (age >= window * dilation) | (age % dilation != 0)
    fresh = (e_pos != NEVER) & (age >= 0) & outside
    seen = torch.cat([fresh.expand(*seen.shape[:-1], -1), seen], -1)
    return k, v, seen, torch.cat([e_pos.expand(*k_pos.shape[:-1], -1), k_pos], -1)
