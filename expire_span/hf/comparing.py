"""A retrofit must not change the model: its logits, with nothing expired, are compared with the base model's first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from .layouts import Layout, evaluated, refused, text_config

EXACT, ROUNDED = 1e-3, 0.1
"""The largest difference of logits that is rounding in any model, relative to their spread: in float32, and in fewer bits."""
COARSE = 0.5
"""The largest one, in fewer bits, for a model whose own logits differ by half as much between one pass and chunks."""
NEAR = 8
"""Number of neighbouring tokens of which the median counts in fewer bits."""


def check_unchanged(retrofitted: Any, layout: Layout) -> None:
    """Refuse a model whose logits the retrofit would change: over a few tokens at once, and in chunks through its cache. In
    half precision and fewer bits a model's own rounding, which trained models amplify, is the measure."""
    assert layout.tokens is not None and layout.logits is not None
    exact = layout.logits.dtype in (torch.float32, torch.float64)
    measure, least, most = (difference, EXACT, EXACT) if exact else (steady_difference, ROUNDED, COARSE)
    for how, read in (("at once", _at_once), ("in chunks through its cache", _in_chunks)):
        error = measure(_run(retrofitted, read, layout.tokens), layout.logits)
        if error <= least:
            continue
        own = measure(_base_in_chunks(retrofitted, layout.tokens), layout.logits)
        if not own <= max(least, most / 2):
            raise ValueError(
                f"{_name(retrofitted)} cannot read in chunks, as a retrofit does: without spans, through its own cache, its "
                f"logits differ by {own:.2g} of their spread from those of one pass; take a model of another family"
            )
        if not error <= (limit := least if exact else max(least, 2 * own)):
            raise ValueError(
                f"{_name(retrofitted)} would not be the same model with spans: read {how}, its logits differ by {error:.2g} of "
                f"their spread from the base model's, and rounding explains at most {limit:.2g}; {_advice(retrofitted)}"
            )


def _advice(retrofitted: Any) -> str:
    if "sdpa" in retrofitted.implementations and any(x.softcap for x in retrofitted.layers):
        return "load it with attn_implementation='eager', since 'sdpa' leaves its soft caps out"
    return "take a model of another family"


@torch.no_grad()
def _base_in_chunks(retrofitted: Any, tokens: Tensor) -> Tensor:
    """Logits of the base model itself, read in chunks through a cache of its own."""
    cache = DynamicCache(config=text_config(retrofitted.model))
    with evaluated(retrofitted.model), retrofitted.paused():
        return _in_chunks(retrofitted, tokens, cache)


def difference(ours: Tensor, base: Tensor) -> float:
    """The root mean square of the differences of logits [1, T, V], relative to their spread over the vocabulary."""
    return float(_by_token(ours, base).square().mean().sqrt())


def steady_difference(ours: Tensor, base: Tensor) -> float:
    """The largest median over `NEAR` neighbouring tokens. In few bits a single token of a trained model may go another way, as
    its rounding falls; what is computed wrongly shows in many: a window of another length, say, in all beyond it."""
    found = _by_token(ours, base)
    return float(found.unfold(1, min(NEAR, found.shape[1]), 1).median(-1).values.max())


def _by_token(ours: Tensor, base: Tensor) -> Tensor:
    """The root mean square of each token's differences, relative to the spread of all, [1, T]."""
    ours, base = ours.double(), base.double()
    spread = (base - base.mean(-1, keepdim=True)).square().mean().sqrt()
    return (ours - base).square().mean(-1).sqrt() / spread.clamp_min(1e-12)


@torch.no_grad()
def _run(retrofitted: Any, read: Any, tokens: Tensor) -> Tensor:
    before = f"{_name(retrofitted)} cannot be retrofitted: its forward pass with spans fails, "
    with (
        evaluated(retrofitted.model),
        retrofitted.expiring_nothing(),
        refused(before, "; take a model of another family"),
    ):
        return read(retrofitted, tokens)


def _at_once(retrofitted: Any, tokens: Tensor) -> Tensor:
    return retrofitted.model(tokens, use_cache=False).logits


def _in_chunks(retrofitted: Any, tokens: Tensor, cache: Any = None) -> Tensor:
    cache, count = retrofitted.new_cache() if cache is None else cache, tokens.shape[1]
    sizes = [count // 2, 1, count - count // 2 - 1]
    return torch.cat(
        [retrofitted.model(x, past_key_values=cache, use_cache=True).logits for x in tokens.split(sizes, 1)], 1
    )


def _name(retrofitted: Any) -> str:
    return f"{type(retrofitted.model).__name__} ({retrofitted.model.config.model_type})"
