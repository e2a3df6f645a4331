"""What a forward pass of a retrofitted model is given: its cache, mask and positions, and what of it is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

from .cache import ExpiringCache


def expiring_cache(past: Any, layer: int) -> ExpiringCache | None:
    """The cache if it is an `ExpiringCache`, else None. An empty cache that grows, which transformers makes by itself for a
    plain forward pass, is allowed; a filled one is refused, and so is one of a fixed size."""
    if past is None or isinstance(past, ExpiringCache):
        return past
    if past.is_compileable or past.get_seq_length(layer) > 0:
        raise ValueError(
            f"a retrofitted model needs its own cache, got a {type(past).__name__}; "
            "pass past_key_values=retrofitted.new_cache() to generate() or to the model"
        )
    return None


def check_cache(retrofitted: Any, cache: ExpiringCache) -> None:
    """Refuse a cache that another retrofit made: its memories are another model's, deleted by that one's ramp and cap."""
    if len(cache.expiring) != len(retrofitted.layers):
        raise ValueError(
            f"this cache has {len(cache.expiring)} layers, the model has {len(retrofitted.layers)}; make one with new_cache()"
        )
    for theirs, layer in zip(cache.expiring, retrofitted.layers):
        made, wanted = (theirs.ramp, theirs.cap), (retrofitted.ramp_of(layer), retrofitted.config.cap)
        if not retrofitted._nothing_expires and made != wanted:
            was, now = (f"ramp {ramp:g} and cap {cap}" for ramp, cap in (made, wanted))
            raise ValueError(
                f"this cache was made by a retrofit with {was}, the model has one with {now}; make one with new_cache()"
            )
    if cache.maker is not None and cache.maker() is not retrofitted:
        raise ValueError(
            "this cache was made by the retrofit of another model, or by an earlier one of this model; make one with "
            "new_cache()"
        )


def check_new_tokens(cache: ExpiringCache, count: int | None, kwargs: dict[str, Any]) -> None:
    """Refuse a call in which all tokens are placed where the cache has read already. `generate` makes one if it is given fewer
    tokens than its cache has read: it takes them for all tokens from the beginning, and drops as many as were read."""
    places, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if count == 0:
        new = False
    elif cache.seen == 0 or places is None or torch.compiler.is_compiling():
        return
    elif places.device.type != "cpu" and count == 1:
        return  # a step of decoding does not wait for the device
    elif mask is None:
        new = int(places.max()) >= cache.seen
    elif not isinstance(mask, Tensor) or mask.dim() != 2:
        return  # refused where it is used
    else:
        new = _follow(cache, places, mask) if mask.shape[1] == count else mask.shape[1] > cache.seen
    if not new:
        raise ValueError(
            f"there are no tokens beyond the {cache.seen} that the cache has read; give generate all tokens from the "
            "beginning, followed by the new ones, or a new cache"
        )


def _follow(cache: ExpiringCache, places: Tensor, mask: Tensor) -> bool:
    """Whether new tokens at `places`, of which `mask` marks those that are no padding, can follow what the cache has read.
    Padding has no place, so a row's first new place is the number of tokens it has read, of which some may be forgotten."""
    memory = cache.expiring[0].memory
    if memory is None or places.shape[-1] != mask.shape[1]:
        return True
    first = places.expand(mask.shape).masked_fill(mask.to(places.device) == 0, cache.seen).amin(-1)
    live = memory.live(cache.seen).flatten(1).amax(-1)
    return bool((first >= live.to(first.device)).all())


def check_inputs(kwargs: dict[str, Any]) -> None:
    """Refuse masks that would be misread, and pictures and sound: some models attend in both directions among their tokens."""
    check_mask_values(kwargs.get("attention_mask"))
    for name, x in kwargs.items():
        if isinstance(x, Tensor) and x.is_floating_point() and name not in ("inputs_embeds", "attention_mask"):
            raise ValueError(
                f"a retrofitted model reads text only, got {name}; leave it out, or call detach() on the retrofit"
            )


def check_mask_values(mask: Any) -> None:
    """Refuse masks that are not 1 for tokens and 0 for padding; an additive one (0 and -inf) would be read inverted."""
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    if mask.device.type != "cpu" and not mask.is_floating_point():
        return  # what tokenizers and `generate` give; a step of decoding does not wait for the device
    wrong = mask[(mask != 0) & (mask != 1)]
    if len(wrong) or (mask.is_floating_point() and not bool(mask.any())):
        got = f"{float(wrong[0]):g}" if len(wrong) else "0 everywhere"
        raise ValueError(
            f"attention_mask must hold 1 for tokens and 0 for padding, got {got}; for an additive mask, give (mask == 0).long()"
        )


def collects_attentions() -> bool:
    """Whether transformers collects attention weights in this forward pass; GPT-2 does not pass output_attentions down."""
    if torch.compiler.is_compiling():
        return False
    collector = getattr(output_capturing, "_active_collector", None)
    return collector is not None and "attentions" in (collector.get() or ())


def find_documents(position_ids: Any, hidden: Tensor) -> Tensor | None:
    """Ids [B, T] of packed documents, found where position_ids start again; None if each row is one document."""
    if position_ids is None or hidden.shape[1] == 1 or torch.compiler.is_compiling():
        return None
    steps = position_ids.diff(dim=-1)
    if bool((steps == 1).all()):
        return None
    ids = torch.nn.functional.pad((steps != 1).cumsum(-1), (1, 0))
    return ids.expand(hidden.shape[0], -1)
