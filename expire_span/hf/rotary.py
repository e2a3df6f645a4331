"""Rotary positions whose angles are exact at every position, so that keys of an endless stream are rotated once and stay.

Transformers multiplies positions and frequencies in float32, which loses the angle: at position 1e6 a score is off by 0.03, at
1e8 by 2.5. Here a frequency is a whole number of turns / 2**64 per token, and its product with the position wraps around in
64-bit integers, as turns do. The difference of two phases then depends on the distance alone, wherever query and key stand. So
positions never have to be renumbered, and a stored key is never rotated, or rounded, a second time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary positions whose angles change with the length of the context, so that stored keys would become wrong."""


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda turns: turns.repeat(2),
    lambda turns: turns.repeat_interleave(2),
    lambda turns: turns,
)
"""Where the two numbers that one angle turns stand in a key: half a key apart, side by side, or left to the layer."""


class ExactAngles:
    """The forward pass of a model's rotary embedding, `rotary.forward`, with exact angles."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
        found = {kind: find_turns(rotary, kind) for kind, rope in kinds.items() if rope not in LENGTH_DEPENDENT}
        self.turns = {kind: turns for kind, turns in found.items() if turns is not None}
        self.complete = len(self.turns) == len(kinds)
        """Whether all kinds of layers get exact angles."""

    @torch.no_grad()
    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, D] in the dtype of x, for integer positions [B, T]."""
        if layer_type not in self.turns:
            return own_angles(self.rotary, x, position_ids, layer_type)
        if self.turns[layer_type].device != x.device:
            self.turns[layer_type] = self.turns[layer_type].to(x.device)  # the model was moved
        if position_ids.dim() == 3:
            position_ids = position_ids[0]  # text has the same position on all axes of an image
        phase = position_ids.to(x.device, torch.int64).unsqueeze(-1) * self.turns[layer_type]
        angle = phase.to(torch.float32) * (math.pi / 2**63)
        scaling = _of_kind(self.rotary, layer_type, "attention_scaling")
        cos, sin = (y if scaling == 1 else y * scaling for y in (angle.cos(), angle.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)


def own_angles(rotary: Any, x: Tensor, position_ids: Tensor, kind: str | None) -> Any:
    """What the model's own rotary embedding computes."""
    return type(rotary).forward(rotary, x, position_ids, **({} if kind is None else {"layer_type": kind}))


def turns_per_token(inverse_frequencies: Tensor) -> Tensor:
    """Turns per token in units of 2**-64, one for each frequency."""
    turns = [round(f / (2 * math.pi) * 2**64) for f in inverse_frequencies.detach().double().tolist()]
    return torch.tensor([(n + 2**63) % 2**64 - 2**63 for n in turns])


@torch.no_grad()
def find_turns(rotary: Any, kind: str | None) -> Tensor | None:
    """Turns per token of each number of a key, [D], in the layout in which the model's own angles come; None if they come in
    none that is known."""
    try:
        frequencies = _of_kind(rotary, kind, "inv_freq")
        x, places = (
            torch.zeros(1, 1, device=frequencies.device),
            torch.tensor([[0, 1, 5, 30]], device=frequencies.device),
        )
        own = own_angles(rotary, x, places, kind)
        scaling = _of_kind(rotary, kind, "attention_scaling")
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(own, tuple) or len(own) != 2 or own[0].is_complex() or frequencies.device.type == "meta":
        return None
    for lay_out in LAYOUTS:
        turns = lay_out(turns_per_token(frequencies)).to(places.device)
        angle = (places.unsqueeze(-1) * turns).float() * (math.pi / 2**63)
        if own[0].shape == angle.shape and all(
            torch.allclose(mine * scaling, theirs.float(), atol=1e-4)
            for mine, theirs in zip((angle.cos(), angle.sin()), own)
        ):
            return turns
    return None


def use_exact_angles(rotaries: list[Any]) -> list[Any]:
    """Let rotary embeddings compute exact angles; returns what `restore_angles` needs."""
    changed = []
    for module in rotaries:
        angles = ExactAngles(module)
        if angles.turns:
            changed.append((module, vars(module).get("forward")))
            module.forward = angles
    return changed


def restore_angles(changed: list[Any]) -> None:
    for module, before in changed:
        vars(module).pop("forward", None)
        if before is not None:  # another package has changed it too
            module.forward = before


def has_exact_angles(rotaries: list[Any]) -> bool:
    """Whether all angles of the model can be computed exactly and do not change with the length of a context. A model without
    any rotary positions has none that could be wrong."""
    return all(ExactAngles(module).complete for module in rotaries)


def _of_kind(rotary: Any, kind: str | None, name: str) -> Any:
    """A field of a rotary embedding; some models have one for each kind of layer."""
    return getattr(rotary, name if kind is None else f"{kind}_{name}")
