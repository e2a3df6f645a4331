"""Checkpoints of the paper's released code as our `paper` decoder, so that their users can move over.

The streaming function is the same: blocks of M tokens, M zero vectors before the first, no attention from a token to
itself, a learned key embedding for distances 1..M, `+1e-8` in the normaliser. `aux.row_loss` is their auxiliary loss before
its weight.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from expire_span.models.systems.expire_span import ExpireSpanConfig, PaperDetails
from expire_span.settings.run import DecoderConfig

from .decoder import Decoder

_LAYER_NAMES = {
    "attn.proj_query.weight": "mixer.query.weight",
    "attn.proj_key.weight": "mixer.key.weight",
    "attn.proj_val.weight": "mixer.value.weight",
    "attn.proj_out.weight": "mixer.out.weight",
    "attn.attn.expire_span.span_predictor.weight": "mixer.span_predictor.weight",
    "attn.attn.expire_span.span_predictor.bias": "mixer.span_predictor.bias",
    "ff.fc1.weight": "ff.up.weight",
    "ff.fc1.bias": "ff.up.bias",
    "ff.fc2.weight": "ff.down.weight",
    "ff.fc2.bias": "ff.down.bias",
    "norm1.weight": "norm1.weight",
    "norm1.bias": "norm1.bias",
    "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias",
}
_KEY_PE = "attn.attn.key_pe"
_MASK = "attn.attn.mask_causal"
"""A buffer of every layer, [M, L + M + R]: it holds no weights, but its shape tells the settings."""


@dataclass(frozen=True)
class Settings:
    """The settings that follow from the shapes of a checkpoint's tensors; `life` is None where they do not determine it."""

    layers: int
    heads: int
    block: int
    pre_norm: bool
    life: int | None
    """The longest life of a memory, max_span + ramp."""


def clean(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the prefix `module.` that training on several GPUs adds to their names."""
    return {name.removeprefix("module."): x for name, x in state_dict.items()}


def read_settings(state_dict: Mapping[str, Tensor]) -> Settings:
    """Derive layers, heads, block and norm from the shapes of the tensors, and the longest life if the mask buffer is there."""
    theirs = clean(state_dict)
    numbers = [int(found[1]) for found in (re.match(r"layers\.(\d+)\.", name) for name in theirs) if found]
    wanted = ("in_emb.weight", f"layers.0.{_KEY_PE}", "layers.0.attn.proj_query.weight", "layers.0.ff.fc1.weight")
    for name, dims in zip(wanted, (2, 3, 2, 2)):
        if name not in theirs:
            raise ValueError(f"the checkpoint lacks {name}: it is not one of the released Expire-Span code")
        if theirs[name].dim() != dims:
            raise ValueError(f"{name} must have {dims} dimensions, got shape {tuple(theirs[name].shape)}")
    _, head_dim, block = theirs[f"layers.0.{_KEY_PE}"].shape
    width = theirs["layers.0.attn.proj_query.weight"].shape[0]
    if head_dim < 1 or width % head_dim:
        raise ValueError(f"the queries' width must be a multiple of key_pe's head dim, got {width} and {head_dim}")
    mask = theirs.get(f"layers.0.{_MASK}")
    life = None if mask is None or mask.dim() != 2 else mask.shape[1] - mask.shape[0]
    return Settings(_count_layers(numbers), width // head_dim, block, "out_norm.weight" in theirs, life)


def _count_layers(numbers: list[int]) -> int:
    """Layers are numbered from 0 without gaps; a stray number must not make us look for a billion layers."""
    found = sorted(set(numbers))
    gap = next((n for n, number in enumerate(found) if n != number), None)
    if gap is not None:
        raise ValueError(f"the checkpoint has layer {found[-1]} but lacks layer {gap}; it is damaged, or not whole")
    return len(found)


def load(
    state_dict: Mapping[str, Tensor],
    *,
    heads: int,
    block: int,
    max_span: int,
    ramp: int,
    pre_norm: bool,
    temperature: float,
    layers: int,
) -> Decoder:
    """Our `paper` decoder with the weights of a released-code checkpoint, in eval mode.

    Args:
        state_dict: the checkpoint's tensors, keys with or without the prefix `module.`; the buffers `mask_causal` are ignored.
        heads, block, max_span, ramp, pre_norm, temperature, layers: as the checkpoint was trained; widths are read off it.
    """
    theirs = clean(state_dict)
    ours = _rename(theirs, layers, pre_norm)
    window = theirs[f"layers.0.{_KEY_PE}"].shape[-1]
    if window != block:
        raise ValueError(
            f"key_pe covers {window} distances but block is {block}; give the block the model was trained with"
        )
    decoder = Decoder(_config(theirs, heads, block, max_span, ramp, pre_norm, temperature, layers))
    _check_tensors(ours, decoder.state_dict())
    decoder.load_state_dict(ours)
    return decoder.eval()


def _config(theirs, heads, block, max_span, ramp, pre_norm, temperature, layers) -> DecoderConfig:
    vocab, dim = theirs["in_emb.weight"].shape
    mixer = ExpireSpanConfig(
        max_span=max_span,
        ramp=ramp,
        temperature=temperature,
        paper=PaperDetails(include_self=False, normalizer_eps=1e-8, initial_memories=block),
    )
    return DecoderConfig.paper(
        vocab=vocab,
        dim=dim,
        layers=layers,
        heads=heads,
        ff_dim=theirs["layers.0.ff.fc1.weight"].shape[0],
        norm="pre" if pre_norm else "post",
        relative_window=block,
        mixer=mixer,
    )


def _rename(theirs: dict[str, Tensor], layers: int, pre_norm: bool) -> dict[str, Tensor]:
    names = {"in_emb.weight": "embed.weight", "out.out_emb.weight": "head.weight", "out.out_emb.bias": "head.bias"}
    if pre_norm:
        names |= {"out_norm.weight": "backbone.norm.weight", "out_norm.bias": "backbone.norm.bias"}
    for n in range(layers):
        names |= {f"layers.{n}.{a}": f"backbone.blocks.{n}.{b}" for a, b in _LAYER_NAMES.items()}
    key_pe = [f"layers.{n}.{_KEY_PE}" for n in range(layers)]
    masks = [f"layers.{n}.{_MASK}" for n in range(layers)]
    _check_names({name: x for name, x in theirs.items() if name not in masks}, [*names, *key_pe])
    ours = {ours: theirs[name] for name, ours in names.items()}
    ours["backbone.relative_keys"] = _relative_keys([theirs[name] for name in key_pe])
    return ours


def _relative_keys(tensors: list[Tensor]) -> Tensor:
    """Theirs (1, D, M): entry p belongs to distance M - p. Ours [M, D]: row d - 1 belongs to distance d."""
    if any(not torch.equal(x, tensors[0]) for x in tensors[1:]):
        raise ValueError("key_pe differs between layers; the released code shares one tensor")
    if tensors[0].shape[0] != 1:
        raise ValueError(f"key_pe must have shape (1, head_dim, block), got {tuple(tensors[0].shape)}")
    return tensors[0][0].T.flip(0).contiguous()


def _check_names(theirs: dict[str, Tensor], wanted: list[str]) -> None:
    missing = [name for name in wanted if name not in theirs]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}")
    extra = sorted(set(theirs) - set(wanted))
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors this model has no place for, first {extra[0]}")


def _check_tensors(given: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Refuse weights of another shape, and what is no plain tensor of finite numbers."""
    for name, x in wanted.items():
        y = given[name]
        if y.shape != x.shape:
            raise ValueError(f"{name} must have shape {tuple(x.shape)}, got {tuple(y.shape)}")
        if not y.is_floating_point() or y.layout != torch.strided or y.is_meta:
            kind = "no data" if y.is_meta else f"{y.dtype} in layout {y.layout}"
            raise ValueError(f"{name} must be a dense tensor of floating-point numbers, got {kind}")
        if not bool(y.float().isfinite().all()):
            raise ValueError(f"{name} must hold finite numbers, got NaN or infinity; the checkpoint cannot be used")
