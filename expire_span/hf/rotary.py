"""Rotating stored keys, so that the positions of an endless stream can be renumbered."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary positions whose angles change with the length of the context, so that stored keys would become wrong."""


def rotate_keys(keys: Tensor, steps: int, inverse_frequencies: Tensor) -> Tensor:
    """Keys [.., D] rotated to positions larger by `steps`. Angles are reduced in float64: steps may be millions."""
    angle = (inverse_frequencies.to(keys.device, torch.float64) * steps) % (2 * torch.pi)
    angle = torch.cat([angle, angle])
    work = torch.promote_types(keys.dtype, torch.float32)
    cos, sin = angle.cos().to(work), angle.sin().to(work)
    turned, rest = keys.to(work).split([len(angle), keys.shape[-1] - len(angle)], -1)
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-second, first], -1) * sin
    return torch.cat([turned, rest], -1).to(keys.dtype)


def inverse_frequencies(model: nn.Module, attention: Any) -> Tensor | None:
    """The rotary frequencies of one attention layer [D/2], or None where positions are not rotary or change with length."""
    found = [m for name, m in model.named_modules() if name.endswith("rotary_emb")]
    if not found:
        return None
    rotary: Any = found[0]
    kind, rope = getattr(attention, "layer_type", None), rotary.rope_type
    if isinstance(rope, dict):
        return None if rope[kind] in LENGTH_DEPENDENT else getattr(rotary, f"{kind}_inv_freq").detach().float().cpu()
    return None if rope in LENGTH_DEPENDENT else rotary.inv_freq.detach().float().cpu()
