"""Rotary positions whose angles are exact at every position, so that keys of an endless stream are rotated once and stay.

Transformers multiplies positions and frequencies in float32, which loses the angle: at position 1e6 a score is off by 0.03, at
1e8 by 2.5. Here a frequency is a whole number of turns / 2**64 per token, and its product with the position wraps around in
64-bit integers, as turns do. The difference of two phases then depends on the distance alone, wherever query and key stand. So
positions never have to be renumbered, and a stored key is never rotated, or rounded, a second time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""Kinds of rotary positions whose angles change with the length of the context, so that stored keys would become wrong."""


class ExactAngles:
    """The forward pass of a model's rotary embedding, `rotary.forward`, with exact angles."""

    def __init__(self, rotary: Any) -> None:
        self.rotary = rotary
        kinds = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
        self.turns = {
            kind: turns_per_token(_of_kind(rotary, kind, "inv_freq"))
            for kind, rope in kinds.items()
            if rope not in LENGTH_DEPENDENT
        }

    @torch.no_grad()
    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, T, D] in the dtype of x, for integer positions [B, T]."""
        if layer_type not in self.turns:
            return type(self.rotary).forward(self.rotary, x, position_ids, layer_type=layer_type)
        if self.turns[layer_type].device != x.device:
            self.turns[layer_type] = self.turns[layer_type].to(x.device)  # the model was moved
        phase = position_ids.to(x.device, torch.int64).unsqueeze(-1) * self.turns[layer_type]
        angle = phase.to(torch.float32) * (math.pi / 2**63)
        scaling = _of_kind(self.rotary, layer_type, "attention_scaling")
        cos, sin = (y if scaling == 1 else y * scaling for y in (angle.cos(), angle.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)


def turns_per_token(inverse_frequencies: Tensor) -> Tensor:
    """Turns per token in units of 2**-64, [D] for frequencies [D/2]: both halves of a key turn alike."""
    turns = [round(f / (2 * math.pi) * 2**64) for f in inverse_frequencies.detach().double().tolist()]
    return torch.tensor([(n + 2**63) % 2**64 - 2**63 for n in turns] * 2)


def use_exact_angles(model: nn.Module) -> list[Any]:
    """Let all rotary embeddings of the model compute exact angles; returns what `restore_angles` needs."""
    changed = []
    for module in find_rotary(model):
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


def find_rotary(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("rotary_emb")]


def has_exact_angles(model: nn.Module, attention: Any) -> bool:
    """Whether the positions of this attention layer are rotary and their angles do not change with the length of a context."""
    found = find_rotary(model)
    if not found:
        return False
    rope = found[0].rope_type
    kind = rope[attention.layer_type] if isinstance(rope, dict) else rope
    return kind not in LENGTH_DEPENDENT


def _of_kind(rotary: Any, kind: str | None, name: str) -> Any:
    """A field of a rotary embedding; some models have one for each kind of layer."""
    return getattr(rotary, name if kind is None else f"{kind}_{name}")
