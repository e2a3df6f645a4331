"""Alignment of rows that began at different times: each row is shifted so that groups of tokens begin at the same places in
all."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def place_rows(new: Tensor, phase: Tensor, length: int, before: Tensor) -> Tensor:
    """Shift each row: entry new[b, i] goes to place phase[b] + i of an output [B, length, ..].

    new [B, T, ..]; phase [B]; before [B, P, ..] with P >= phase. All other places hold what `before` holds there, or zero
    beyond its end.
    """
    source = torch.arange(length, device=new.device) - phase.unsqueeze(1)  # [B, length]
    inside = (source >= 0) & (source < new.shape[1])
    trailing = (1,) * (new.dim() - 2)
    index = source.clamp(0, new.shape[1] - 1).reshape(*source.shape, *trailing).expand(-1, -1, *new.shape[2:])
    rest = F.pad(before.to(new.dtype), (0, 0) * (new.dim() - 2) + (0, length - before.shape[1]))
    return torch.where(inside.reshape(*source.shape, *trailing), new.gather(1, index), rest)


def take_rows(x: Tensor, first: Tensor, count: int) -> Tensor:
    """Row b's `count` entries from first[b] on: x [B, S, ..] -> [B, count, ..]."""
    index = first.unsqueeze(1) + torch.arange(count, device=x.device)
    return x.gather(1, index.reshape(*index.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, *x.shape[2:]))
