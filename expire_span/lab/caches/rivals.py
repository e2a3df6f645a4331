"""Small implementations of caches that evict by a fixed rule, for comparison.

Each holds the same number of memories in every layer and head, and evicts after every forward pass:

    window  the newest
    sinks   the first four and the newest (StreamingLLM's rule; positions are not renumbered)
    knorm   the newest few and those with the smallest key norm
    snap    the newest few and those that the last queries attended to most (SnapKV's rule, applied throughout)

Keys keep the rotation of the position at which they were written. The model was not trained for any eviction, so all of these
are approximations.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from expire_span.hf.attention_function import observed

NAME = "expire_span_observed"
METHODS = ("window", "sinks", "knorm", "snap")
SINKS = 4
LEAST_CAPACITY = 2 * SINKS
RECENT = 32
"""Number of newest memories that knorm and snap always keep, and of last queries whose attention snap counts."""


class EvictingLayer(DynamicLayer):
    """Holds at most `capacity` memories per head after each forward pass."""

    is_croppable = False

    def __init__(self, method: str, capacity: int) -> None:
        super().__init__()
        self.method, self.capacity, self.seen = method, capacity, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen += key_states.shape[-2]
        return super().update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = self.keys.shape[-2] if self.is_initialized and self.keys is not None and self.keys.numel() else 0
        return held + query_length, self.seen - held

    def evict(self, query: Tensor, scaling: float) -> None:
        """Keep the best `capacity` memories of each head, in order of birth."""
        assert self.keys is not None and self.values is not None
        count = self.keys.shape[-2]
        if count <= self.capacity:
            return
        kept = self._scores(query, scaling).topk(self.capacity, -1).indices.sort(-1).values  # [B, Hkv, n]
        index = kept.unsqueeze(-1).expand(*kept.shape, self.keys.shape[-1])
        self.keys, self.values = self.keys.gather(2, index), self.values.gather(2, index)

    def _scores(self, query: Tensor, scaling: float) -> Tensor:
        """A number for each memory [B, Hkv, S]; the largest stay."""
        keys = self.keys
        assert keys is not None
        order = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        if self.method == "window":
            return order
        if self.method == "sinks":
            return torch.where(order < SINKS, keys.shape[2], order)
        worth = -keys.float().norm(dim=-1) if self.method == "knorm" else _attention_of_last(query, keys, scaling)
        newest = order >= keys.shape[2] - min(RECENT, self.capacity // 2)
        return torch.where(newest, torch.inf, worth)


def _attention_of_last(query: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Mean attention of the last queries to each memory, smoothed over neighbours: [B, Hkv, S]."""
    query = query[:, :, -RECENT:].unflatten(1, (keys.shape[1], -1)).float()  # [B, Hkv, G, w, D]
    scores = query @ keys.float().unsqueeze(2).mT * scaling
    count, memories = scores.shape[-2:]
    late = torch.ones(count, memories, dtype=torch.bool, device=keys.device).triu(memories - count + 1)
    worth = scores.masked_fill(late, -torch.inf).softmax(-1).mean((2, 3))
    return F.max_pool1d(worth, 5, stride=1, padding=2)


class EvictingCache(Cache):
    """One of the methods above, with the same capacity in all layers."""

    def __init__(self, method: str, capacity: int, layers: int) -> None:
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; known are {', '.join(METHODS)}")
        if capacity < LEAST_CAPACITY:
            raise ValueError(f"a capacity of at least {LEAST_CAPACITY} memories is needed, got {capacity}")
        super().__init__(layers=[EvictingLayer(method, capacity) for _ in range(layers)])


def evicting(modules: list[nn.Module], configs: list[Any]) -> AbstractContextManager[None]:
    """A context in which evicting caches see the queries; afterwards the model is restored."""
    return observed(NAME, _attend, modules, configs, _hand_over)


def _hand_over(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    return args, {**kwargs, "evicting_layer": None if cache is None else cache.layers[module.layer_idx]}


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, evicting_layer: Any, **kwargs: Any
) -> Any:
    out = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
    if isinstance(evicting_layer, EvictingLayer):
        evicting_layer.evict(query, kwargs.get("scaling") or query.shape[-1] ** -0.5)
    return out
