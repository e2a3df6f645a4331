"""Cache layers of hybrids: the recurrent states that a model keeps beside its attention, or in place of it.

They are left as the model makes them. Here is what an `ExpiringCache` needs beyond that: copies, choice of rows, and saving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils

_Mixin: Any = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
_Layer: Any = getattr(cache_utils, "LinearAttentionLayer", object)
STATES = ("conv_states", "recurrent_states")
_STARTED = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}


EmptyLayer: Any = getattr(cache_utils, "DummyLayer", type(None))
"""Holds the place of a layer that keeps nothing, since it reads another layer's keys or does not attend (from 5.23 on)."""


def recurrent_layers(cache: Any) -> dict[int, int]:
    """The layers of transformers' cache that hold recurrent states, and the number of states of each."""
    if _Mixin is None:
        return {}
    found = {n: layer for n, layer in enumerate(cache.layers) if isinstance(layer, _Mixin)}
    return {n: getattr(layer, "number_of_states", 1) for n, layer in found.items()}


class RecurrentLayer(_Layer):
    """A layer with recurrent states alone."""

    is_croppable = False
    """States of earlier tokens are gone, so that none can be taken back."""

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"a recurrent layer cannot take back {abs(tokens_to_remove)} tokens; fork the cache before, and decode without "
                "prompt lookup or an assistant model"
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        map_states(self, lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        map_states(self, lambda x: x[indices.to(x.device)])


def map_states(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each state of a layer, in dicts of its own."""
    for name in STATES:
        setattr(layer, name, {n: None if x is None else change(x) for n, x in getattr(layer, name).items()})


def copy_states(layer: Any) -> None:
    """Give a shallow copy of a layer states and notes of its own."""
    map_states(layer, torch.clone)
    for name, value in vars(layer).items():
        if isinstance(value, dict) and name not in STATES:
            setattr(layer, name, dict(value))


def states_of(layer: Any) -> dict[str, dict[str, Tensor]]:
    """The states by name and number, without those that are empty."""
    found = {name: {str(n): x for n, x in getattr(layer, name).items() if x is not None} for name in STATES}
    return {name: x for name, x in found.items() if x}


def load_states(layer: Any, states: dict[str, dict[str, Tensor]]) -> None:
    """Go on from what `states_of` gave."""
    for name in STATES:
        for n, x in states.get(name, {}).items():
            # Layers change their states in place, so that each has tensors of its own.
            getattr(layer, name)[int(n)] = x.clone()
            getattr(layer, _STARTED[name])[int(n)] = True
            layer.has_previous_state[int(n)] = True
            if name == "conv_states":
                layer.conv_kernel_size[int(n)] = x.shape[-1]
                layer.device, layer.dtype = x.device, x.dtype
            elif layer.device is None:
                layer.device, layer.dtype = x.device, x.dtype
