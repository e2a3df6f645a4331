"""A fingerprint of a model's weights that survives rounding: whether a model is the one that an adapter was made for.

An adapter records a few numbers of many weights. A model is taken for the same one if

- each vector (norms and biases, which no way of rounding models to few bits touches) agrees to the rounding of bfloat16, and
- each matrix points in the same direction and is as long, as far as rounding in groups to four bits leaves it so.

So the same weights in float16, in bfloat16, or rounded to eight or four bits are accepted; another checkpoint, another seed, a
layer in another place, and further training that moved the norms are refused. Training that left all vectors as they were and
moved the matrices less than rounding to four bits does (a merged LoRA, mostly) cannot be told from rounding, and is accepted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.checks import require, show

MOST = 96
"""Largest number of vectors, and of matrices, whose numbers are recorded."""
NUMBERS = 32
"""Numbers of each of them, evenly spaced."""
VECTOR = 2**-7
"""Largest relative difference of a vector's numbers: two roundings to bfloat16."""
ALIKE, LENGTH = 0.9, 1.25
"""Least cosine between a matrix's numbers, and largest ratio of their lengths."""
MEAN_ALIKE = 0.97
"""Least mean cosine over all matrices; rounding to four bits in groups leaves about 0.995."""

Record = dict[str, tuple[list[int], str]]
"""For each weight its shape, and numbers as base64 of float32."""


def record_of(weights: dict[str, Tensor]) -> Record:
    """The fingerprint of plain weights; of rounded models that hold others, as far as they have plain ones."""
    plain = {n: x for n, x in sorted(weights.items()) if x.is_floating_point() and x.numel()}
    kinds = [n for n, x in plain.items() if x.dim() == 1], [n for n, x in plain.items() if x.dim() > 1]
    chosen = [name for names in kinds for name in names[:: -(-len(names) // MOST) or 1]]
    return {name: (list(plain[name].shape), _pack(_numbers(plain[name]))) for name in sorted(chosen)}


def check_record(record: Any) -> None:
    require(isinstance(record, dict), f"base.fingerprint must be a table of weights, got {show(record)}")
    for name, entry in record.items():
        fits = isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], list) and isinstance(entry[1], str)
        require(fits, f"base.fingerprint.{name} must be a shape and numbers, got {show(entry)}")
        try:
            _unpack(entry[1])
        except (ValueError, RuntimeError):
            require(False, f"base.fingerprint.{name} must hold numbers as base64, got {show(entry[1])}")


def find_difference(record: Record, read: Callable[[str, tuple[int, ...]], Tensor | None]) -> str | None:
    """What about a model is not as recorded, as the end of a sentence; None if it is the same one. read: gives a weight by name
    and shape, or None where the model holds it in a form that cannot be read."""
    cosines = []
    for name, (shape, packed) in record.items():
        theirs, found = _unpack(packed), read(name, tuple(shape))
        if found is None:
            continue
        if tuple(found.shape) != tuple(shape):
            return f"its {name} has the shape {tuple(found.shape)} in place of {tuple(shape)}"
        ours = _numbers(found)
        if len(shape) == 1:
            if not bool(((ours - theirs).abs() <= VECTOR * torch.maximum(ours.abs(), theirs.abs()) + 1e-6).all()):
                return f"its {name} differs by up to {float((ours - theirs).abs().max()):.2g}, more than rounding does"
            continue
        alike = _likeness(ours, theirs)
        if alike < ALIKE:
            return f"its {name} holds other numbers"
        cosines.append(alike)
    if not cosines:
        return "none of its matrices can be compared with the recorded ones"
    mean = sum(cosines) / len(cosines)
    return (
        None if mean >= MEAN_ALIKE else f"its matrices are alike to {mean:.3f} only, and rounding leaves {MEAN_ALIKE:g}"
    )


def _likeness(ours: Tensor, theirs: Tensor) -> float:
    """The cosine between two vectors; 0 if their lengths differ too much."""
    lengths = float(ours.norm()), float(theirs.norm())
    if max(lengths) < 1e-6:
        return 1.0
    if max(lengths) > LENGTH * min(lengths):
        return 0.0
    return float(ours @ theirs) / (lengths[0] * lengths[1])


def reader_of(model: nn.Module, weights: dict[str, Tensor]) -> Callable[[str, tuple[int, ...]], Tensor | None]:
    """`read` for `find_difference`: weights as they are, and those of bitsandbytes expanded."""
    own = {name.replace(".base_layer.", "."): x for name, x in model.named_parameters() if "lora_" not in name}

    def read(name: str, shape: tuple[int, ...]) -> Tensor | None:
        found = weights.get(name)
        if found is not None and found.is_floating_point():
            return found
        held = own.get(name)
        return None if held is None else _expand(held, shape)

    return read


def _expand(held: Any, shape: tuple[int, ...]) -> Tensor | None:
    """The numbers of a weight that bitsandbytes holds in 4 or 8 bits; None for other forms."""
    state, scale = getattr(held, "quant_state", None), getattr(held, "SCB", None)
    if state is not None:
        from bitsandbytes.functional import dequantize_4bit  # type: ignore[import-not-found]

        return dequantize_4bit(held.data, state)
    if scale is not None and tuple(held.shape) == shape:
        return held.data.float() * scale.float().view(-1, *[1] * (len(shape) - 1)) / 127
    return None


def _numbers(x: Tensor) -> Tensor:
    flat = x.detach().flatten()
    places = torch.linspace(0, x.numel() - 1, min(NUMBERS, x.numel()), dtype=torch.float64).long()
    return flat[places.to(flat.device)].float().cpu()


def _pack(x: Tensor) -> str:
    return base64.b64encode(x.contiguous().numpy().astype("<f4").tobytes()).decode()


def _unpack(packed: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(packed, validate=True)), dtype=torch.float32)
