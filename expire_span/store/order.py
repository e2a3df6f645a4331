"""Which memories a cap evicts, and how slots are ordered and emptied, in every layout of the store."""

from __future__ import annotations

import torch
from torch import Tensor

from expire_span.ops.rule import NEVER


def find_living(left: Tensor, cap: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Which memories stay, given the steps that each has `left` [.., S], and how many living ones the cap evicts [..].

    Under a cap, the memories with the fewest steps left go first, and the older of equals. Without one, or where no row
    can exceed it, nothing is evicted and the count is None.
    """
    alive = left > 0
    if cap is None or cap >= left.shape[-1]:
        return alive, None
    ranked = left.masked_fill(~alive, -torch.inf).argsort(dim=-1, stable=True)[..., : left.shape[-1] - cap]
    evicted = torch.zeros_like(alive).scatter(-1, ranked, True)
    return alive & ~evicted, (alive & evicted).sum(-1)


def find_weakest(left: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
    """The slot that a cap evicts first, and how many memories live, both [..], given the steps that each has `left` [.., S].

    The same choice as in `find_living`, for slots in any order: the fewest steps left, and of equals the oldest.
    """
    alive = left > 0
    least = left.masked_fill(~alive, torch.inf)
    tied = alive & (least == least.amin(-1, keepdim=True))
    return pos.masked_fill(~tied, torch.inf).argmin(-1), alive.sum(-1)


def order_living_last(alive: Tensor) -> Tensor:
    """A permutation [.., S] that moves living slots to the end in their order of birth, and all others to the front.

    It is built from one running count instead of a sort, so its shape and cost do not depend on which memories died.
    """
    count = alive.shape[-1]
    index = torch.arange(count, device=alive.device)
    rank = alive.cumsum(-1)  # for a living slot: its number among the living, from 1
    target = torch.where(alive, count - rank[..., -1:] + rank - 1, index - rank)
    return torch.zeros_like(target).scatter(-1, target, index.expand_as(target))


def take_slots(x: Tensor, order: Tensor) -> Tensor:
    """Gather slots: x [*rows, S, ..], order [*rows, n] -> [*rows, n, ..]."""
    rest = x.shape[order.dim() :]
    if rest and x.device.type == "cpu":  # index_select copies whole slots; gather would look up every number separately
        first = torch.arange(order.shape[:-1].numel()) * x.shape[order.dim() - 1]
        places = order + first.reshape(*order.shape[:-1], 1)
        return x.reshape(-1, *rest).index_select(0, places.flatten()).reshape(*order.shape, *rest)
    index = order.reshape(order.shape + (1,) * (x.dim() - order.dim()))
    return x.gather(order.dim() - 1, index.expand(*order.shape, *x.shape[order.dim() :]))


def wipe(x: Tensor, keep: Tensor, value: int = 0) -> Tensor:
    """x [*rows, S, ..] with `value` in every slot that `keep` [*rows, S] does not mark."""
    return x.masked_fill(~keep.reshape(keep.shape + (1,) * (x.dim() - keep.dim())), value)


def blank(name: str) -> int:
    """What an empty slot of the field `name` holds."""
    return NEVER if name == "pos" else 0
