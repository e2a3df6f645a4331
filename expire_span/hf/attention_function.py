"""Running a model with another attention function, which sees queries and keys; afterwards the model is restored."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


@contextlib.contextmanager
def attention_function(
    name: str, attend: Callable[..., Any], make_mask: Callable[..., Any], configs: list[Any]
) -> Iterator[None]:
    """A context in which models with these configs call `attend` and `make_mask`, registered with transformers as `name`."""
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, make_mask)
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, was in zip(configs, before):
            config._attn_implementation_internal = was


@contextlib.contextmanager
def observed(
    name: str, attend: Callable[..., Any], modules: list[nn.Module], configs: list[Any], hook: Callable[..., Any]
) -> Iterator[None]:
    """A context in which attention layers call `attend`.

    hook: a forward pre-hook of each layer, which may add keyword arguments for `attend`.
    """
    with attention_function(name, attend, sdpa_mask, configs), contextlib.ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
