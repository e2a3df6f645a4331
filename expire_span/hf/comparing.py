"""A retrofit must not change the model: its logits, with nothing expired, are compared with the base model's first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .layouts import Layout, evaluated, refused, text_config

EXACT, ROUNDED = 1e-3, 0.1
"""The largest difference of logits that can be rounding, relative to their spread: in float32, and in half precision."""


def check_unchanged(handle: Any, layout: Layout) -> None:
    """Refuse a model whose logits the retrofit would change: over a few tokens at once, and in chunks through its cache."""
    assert layout.tokens is not None and layout.logits is not None
    limit = EXACT if layout.logits.dtype in (torch.float32, torch.float64) else ROUNDED
    for how, read in (("at once", _at_once), ("in chunks through its cache", _in_chunks)):
        error = difference(_run(handle, read, layout.tokens), layout.logits)
        if not error <= limit:
            _check_base(handle, layout, limit)
            raise ValueError(
                f"{_name(handle)} would not be the same model with spans: read {how}, its logits differ by {error:.2g} of "
                f"their spread from the base model's, and rounding explains at most {limit:g}; {_advice(handle)}"
            )


def _advice(handle: Any) -> str:
    if "sdpa" in handle.implementations and any(x.softcap for x in handle.layers):
        return "load it with attn_implementation='eager', since 'sdpa' leaves its soft caps out"
    return "take a model of another family"


@torch.no_grad()
def _check_base(handle: Any, layout: Layout, limit: float) -> None:
    """Say so if the base model itself is another one when it reads in chunks, through a cache of its own."""
    assert layout.tokens is not None and layout.logits is not None
    cache = DynamicCache(config=text_config(handle.model))
    with evaluated(handle.model), handle.paused():
        error = difference(_in_chunks(handle, layout.tokens, cache), layout.logits)
    if not error <= limit:
        raise ValueError(
            f"{_name(handle)} cannot read in chunks, as a retrofit does: without spans, through a cache of its own, its logits "
            f"differ by {error:.2g} of their spread from those of one pass; take a model of another family"
        )


def difference(ours: Tensor, base: Tensor) -> float:
    """The root mean square of the differences of logits [.., V], relative to their spread over the vocabulary."""
    ours, base = ours.double(), base.double()
    spread = (base - base.mean(-1, keepdim=True)).square().mean().sqrt()
    return float((ours - base).square().mean().sqrt() / spread.clamp_min(1e-12))


@torch.no_grad()
def _run(handle: Any, read: Any, tokens: Tensor) -> Tensor:
    before = f"{_name(handle)} cannot be retrofitted: its forward pass with spans fails, "
    with evaluated(handle.model), handle.expiring_nothing(), refused(before, "; take a model of another family"):
        return read(handle, tokens)


def _at_once(handle: Any, tokens: Tensor) -> Tensor:
    return handle.model(tokens, use_cache=False).logits


def _in_chunks(handle: Any, tokens: Tensor, cache: Any = None) -> Tensor:
    cache, count = handle.new_cache() if cache is None else cache, tokens.shape[1]
    sizes = [count // 2, 1, count - count // 2 - 1]
    return torch.cat([handle.model(x, past_key_values=cache, use_cache=True).logits for x in tokens.split(sizes, 1)], 1)


def _name(handle: Any) -> str:
    return f"{type(handle.model).__name__} ({handle.model.config.model_type})"
