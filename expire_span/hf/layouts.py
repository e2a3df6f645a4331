"""The model families that can be retrofitted, and the checks that refuse all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

ROTARY = {"llama", "qwen2", "qwen3", "gemma", "gemma3_text", "mistral", "gpt_neox"}
"""Families with rotary positions: the positions of an endless stream can be renumbered."""
TABLES = {"gpt2": "n_positions"}
"""Families with a learned position table, and the setting that holds its length."""
SOFT_CAPPED = {"gemma2", "gemma3n", "gemma4", "grok"}
"""Families that squash attention scores before the softmax, which the operator does not do."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a causal model and what a retrofit must know about it."""

    module: nn.Module
    index: int
    dim: int
    kv_heads: int
    head_dim: int
    window: int | None
    """The layer's own sliding window in tokens, the query's included; None if it has none."""


def find_layers(model: nn.Module) -> list[AttentionLayer]:
    """The attention layers in order. ValueError if the model cannot be retrofitted."""
    config = text_config(model)
    check_config(model.config, type(model).__name__)
    _check_parts(model, config)
    modules: list[Any] = [
        m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")
    ]
    modules.sort(key=lambda m: m.layer_idx)
    expected = list(range(config.num_hidden_layers))
    found = [m.layer_idx for m in modules]
    if found != expected:
        raise ValueError(
            f"unknown attention layout: {type(model).__name__} should have attention layers {_ends(expected)}, got "
            f"{_ends(found)}; known families are {', '.join(known())}"
        )
    return [_describe(module, config) for module in modules]


def known() -> list[str]:
    return sorted(ROTARY | set(TABLES))


def text_config(model: nn.Module) -> Any:
    """The config of the language part."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(f"retrofit needs a transformers causal language model, got {type(model).__name__}")
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def table_length(config: Any) -> int | None:
    """Length of the learned position table; None for models with rotary positions."""
    name = TABLES.get(config.model_type)
    return None if name is None else int(getattr(config, name))


def check_config(whole: Any, name: str) -> None:
    """Refuse a model that cannot be retrofitted by its config alone, before its weights are loaded."""
    config = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    kind = config.model_type
    if getattr(whole, "is_encoder_decoder", False):
        raise ValueError(
            f"retrofit needs a decoder-only model, got the encoder-decoder {name} ({kind}); known families are "
            f"{', '.join(known())}"
        )
    if kind in SOFT_CAPPED or getattr(config, "attn_logit_softcapping", None):
        cap = getattr(config, "attn_logit_softcapping", None)
        raise ValueError(
            f"{name} ({kind}) soft-caps its attention scores at {cap}, which expiring attention does not do; take a model "
            f"of another family: {', '.join(known())}"
        )
    if kind not in known():
        raise ValueError(f"unknown attention layout {kind} of {name}; known families are {', '.join(known())}")


def _check_parts(model: Any, config: Any) -> None:
    name, kind = type(model).__name__, config.model_type
    if not callable(getattr(model, "generate", None)) or model.get_output_embeddings() is None:
        raise ValueError(f"retrofit needs a causal language model with an output layer (...ForCausalLM), got {name}")
    if getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        raise ValueError(f"retrofit needs causal attention, but {name} ({kind}) attends in both directions")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"retrofit needs a decoder-only model, but {name} ({kind}) has cross-attention")


def _describe(module: Any, config: Any) -> AttentionLayer:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return AttentionLayer(module, module.layer_idx, config.hidden_size, heads, head_dim, _window(module, config))


def _window(module: Any, config: Any) -> int | None:
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None


def _ends(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]} ({len(numbers)})" if numbers else "none"
