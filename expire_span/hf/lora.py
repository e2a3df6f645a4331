"""LoRA weights for a retrofitted model's linear layers, through peft; removing them restores the model exactly."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from expire_span.errors import UserError
from expire_span.extras import install_command
from expire_span.store.device_memory import check_fits

NAME = "expire_span"
LEARNED_BYTES = 16
"""Bytes per number that learns: its value, its gradient and two running means of Adam, each in float32."""


def add_lora(model: Any, rank: int, seed: int = 0) -> list[nn.Parameter]:
    """Wrap all linear layers except the output layer and return the new weights, whose initial contribution is zero."""
    if importlib.util.find_spec("peft") is None:
        raise UserError(f"LoRA needs peft; install it with: {install_command('hf')}")
    from peft import LoraConfig, inject_adapter_in_model

    names = _linear_names(model)
    _check_size(model, names, rank)
    flags = [(p, p.requires_grad) for p in model.parameters()]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names, lora_dropout=0.0)
        inject_adapter_in_model(settings, model, adapter_name=NAME)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return [p for name, p in model.named_parameters() if "lora_" in name]


def _check_size(model: Any, names: list[str], rank: int) -> None:
    """Refuse a rank whose weights cannot fit: each layer gets two matrices, one with a side of its input, one of its output."""
    count = rank * sum(sum(model.get_submodule(name).weight.shape) for name in names)
    device = next(model.parameters()).device
    check_fits(LEARNED_BYTES * count, f"low-rank additions of {count:,} numbers", f"rank {rank:,}", device)


def _linear_names(model: Any) -> list[str]:
    """Full names of the layers to wrap: all linear layers inside blocks."""
    head = model.get_output_embeddings()
    kinds = ("Linear", "Conv1D")
    return [n for n, m in model.named_modules() if type(m).__name__ in kinds and m is not head and "lm_head" not in n]


def _wrapped(model: nn.Module) -> list[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, m) for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)]


@contextlib.contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """A context in which the model runs without its LoRA weights."""
    layers = [m for _, m in _wrapped(model)]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def remove_lora(model: nn.Module) -> None:
    """Put the original linear layers back."""
    for name, wrapped in _wrapped(model):
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(parent, name.rpartition(".")[2], wrapped.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """The LoRA weights, by their names in the model."""
    return {name: p for name, p in model.named_parameters() if "lora_" in name}
