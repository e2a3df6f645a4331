"""Attention within groups: a query reads the last `members` tokens of its own group. `routing` and `reformer` use it.

Tokens are sorted by group and, within a group, by age, oldest first; each then reads a band of the sorted order, so that no
mask over all pairs is needed. The state keeps the last `members` tokens of every group and head, so that streaming in pieces of
any size equals the parallel form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.models.kit.banded import banded_attention
from expire_span.store import NEVER

GroupSlots = dict[str, Tensor]
"""{"k", "v": [B, H, groups * members, D], "pos": [B, H, groups * members]}: oldest first within a group."""


def empty_slots(batch: int, heads: int, groups: int, members: int, head_dim: int, like: Tensor) -> GroupSlots:
    keys = like.new_zeros(batch, heads, groups * members, head_dim)
    pos = torch.full((batch, heads, groups * members), NEVER, dtype=torch.int64, device=like.device)
    return {"k": keys, "v": keys.clone(), "pos": pos}


def grouped_attention(
    q: Tensor, k: Tensor, v: Tensor, pos: Tensor, group: Tensor, slots: GroupSlots, *, members: int, **options: Any
) -> tuple[Tensor, GroupSlots, Tensor]:
    """Each query reads the last `members` tokens of its group, itself included.

    Args:
        q, k, v: [B, H, T, D] at consecutive positions pos [T].
        group: number of each token's group [B, H, T], from 0.
        slots: the last members of each group from earlier blocks, or `empty_slots`.
        options: of `banded_attention`; `chunks=True` reads two chunks of the sorted order, as Reformer does.

    Returns y [B, H, T, .], the slots after the block, and how many tokens each query reads [B, H, T].
    """
    if q.shape[2] == 1:
        return _step(q, k, v, pos, group, slots, members, options)
    batch, heads, _, _ = q.shape
    size = slots["pos"].shape[2]
    held = torch.arange(size // members, device=q.device).repeat_interleave(members).expand(batch, heads, -1)
    every = torch.cat([held, group], 2)  # [B, H, size + T]
    order = every.argsort(dim=2, stable=True)
    keys, values = (_take(torch.cat([slots[n].to(x.dtype), x], 2), order) for n, x in (("k", k), ("v", v)))
    places = torch.cat([slots["pos"], pos.expand(batch, heads, -1)], 2).gather(2, order)
    y = banded_attention(
        _take(F.pad(q, (0, 0, size, 0)), order),
        F.pad(keys, (0, 0, members, 0)),
        F.pad(values, (0, 0, members, 0)),
        F.pad(places, (members, 0), value=NEVER),
        group=F.pad(every.gather(2, order), (members, 0), value=-1),
        window=members,
        **options,
    )
    ends = F.one_hot(group, size // members).sum(2).add(members).cumsum(2)  # [B, H, groups]: where each group ends
    last = (ends.unsqueeze(3) - members + torch.arange(members, device=q.device)).flatten(2)
    after = {"k": _take(keys, last).detach(), "v": _take(values, last).detach(), "pos": places.gather(2, last)}
    back = order.argsort(dim=2)[:, :, size:]
    live = _ranks(places != NEVER, every.gather(2, order), ends).clamp(max=members).gather(2, back)
    return _take(y, back), after, live


def _step(
    q, k, v, pos, group, slots: GroupSlots, members: int, options: dict[str, Any]
) -> tuple[Tensor, GroupSlots, Tensor]:
    """`grouped_attention` of a single token, without sorting: read the slots of its group, then shift them by one."""
    index = group * members + torch.arange(members, device=q.device)  # [B, H, members]
    stretch = {name: torch.cat([_take(slots[name].to(x.dtype), index), x], 2) for name, x in (("k", k), ("v", v))}
    places = torch.cat([slots["pos"].gather(2, index), pos.expand(*group.shape)], 2)
    y = banded_attention(q, stretch["k"], stretch["v"], places, window=members, **{**options, "chunks": False})
    wide = index.unsqueeze(3).expand(-1, -1, -1, k.shape[3])
    pushed = {n: slots[n].to(x.dtype).scatter(2, wide, x[:, :, 1:].detach()) for n, x in stretch.items()}
    after = {**pushed, "pos": slots["pos"].scatter(2, index, places[:, :, 1:])}
    return y, after, (places[:, :, 1:] != NEVER).sum(2, keepdim=True)


def _ranks(valid: Tensor, group: Tensor, ends: Tensor) -> Tensor:
    """For entries sorted by group [B, H, S], the number of valid entries of the same group up to each, itself included."""
    total = F.pad(valid.cumsum(2), (1, 0))  # [B, H, S + 1]: valid before each place
    before = total.gather(2, F.pad(ends[:, :, :-1], (1, 0)))  # at each group's start
    return total[:, :, 1:] - before.gather(2, group)


def _take(x: Tensor, order: Tensor) -> Tensor:
    """Gather entries: x [B, H, S, D] and order [B, H, n] -> [B, H, n, D]."""
    return x.gather(2, order.unsqueeze(3).expand(-1, -1, -1, x.shape[3]))
