"""What a retrofit must know about a model's attention: read from its config and from one short forward pass, for any family.

`find_layout` refuses, by name and with the reason, what expiring attention cannot compute.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .gguf import check_unpacked
from .probing import AttentionCall, Probe, probe
from .recurrent import EmptyLayer, recurrent_layers

SHORT, LONG = 24, 160
"""Tokens of the forward pass that is compared, unless the model has a sliding window; most of them with one."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a causal model and what a retrofit must know about it."""

    module: nn.Module
    index: int
    """Index of the layer's part of the cache."""
    dim: int
    kv_heads: int
    head_dim: int
    window: int | None
    """The layer's own sliding window in tokens, the query's included; None if it has none."""
    softcap: float = 0.0
    """Scores are squashed to this size before the softmax; 0 if they are not."""
    sinks: bool = False
    """Whether each head has an extra logit in its softmax, to which no value belongs."""


@dataclass
class Layout:
    """The attention of a causal model."""

    layers: list[AttentionLayer]
    """Layers that write keys and values, in the order of the forward pass."""
    readers: dict[nn.Module, int] = field(default_factory=dict)
    """Attention modules that read the keys of an earlier layer, and its index."""
    recurrent: dict[int, int] = field(default_factory=dict)
    """Cache layers with recurrent states, which are left alone, and the number of their states; some attend too."""
    cache_layers: int = 0
    rotary: list[nn.Module] = field(default_factory=list)
    """Modules that compute rotary angles."""
    table: int | None = None
    """Length of the learned position table, where there is one."""
    takes_positions: bool = True
    """Whether the model is given positions; else it counts the tokens of its cache."""
    tokens: Tensor | None = None
    """Tokens [1, n] that the base model has read, and its logits [1, n, V], to compare with."""
    logits: Tensor | None = None


def find_layout(model: Any) -> Layout:
    """The model's attention. ValueError if the model cannot be retrofitted."""
    config = text_config(model)
    check_config(model.config, type(model).__name__)
    check_unpacked(model)
    _check_parts(model, config)
    name = f"{type(model).__name__} ({config.model_type})"
    tokens = _tokens(model, config)
    seen = _probe(model, config, tokens, name)
    _check_calls(seen, name)
    recurrent = recurrent_layers(seen.cache)
    layers = sorted((_describe(call) for call in seen.calls if call.writes), key=lambda x: x.index)
    readers = {call.module: call.index for call in seen.calls if not call.writes and call.index is not None}
    _check_cache(seen, layers, recurrent, name)
    return Layout(
        layers,
        readers,
        recurrent,
        len(seen.cache.layers),
        seen.rotary,
        table_length(model, seen.embeddings),
        "position_ids" in inspect.signature(model.forward).parameters,
        tokens,
        seen.logits,
    )


def text_config(model: Any) -> Any:
    """The config of the language part."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type"):
        raise ValueError(f"retrofit needs a transformers causal language model, got {type(model).__name__}")
    return _text_part(config)


def _text_part(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def configs_of(model: Any) -> list[Any]:
    """All config objects of the model's parts, each once: any of them may be what an attention layer asks."""
    found = [model.config, text_config(model)]
    found += [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "_attn_implementation")]
    return list({id(c): c for c in found}.values())


def table_length(model: Any, embeddings: list[nn.Module]) -> int | None:
    """Length of the learned position table among the embeddings that were read; None for models that have none."""
    lengths = []
    for name, module in model.named_modules():
        part = name.rpartition(".")[2].lower()
        if (
            isinstance(module, nn.Embedding)
            and module in embeddings
            and (part == "wpe" or "position" in part or "pos_emb" in part)
        ):
            lengths.append(module.num_embeddings - int(getattr(module, "offset", 0)))
    return min(lengths, default=None)


def check_config(whole: Any, name: str) -> None:
    """Refuse a model that cannot be retrofitted by its config alone, before its weights are loaded."""
    config = _text_part(whole)
    kind = config.model_type
    if getattr(whole, "is_encoder_decoder", False):
        raise ValueError(f"retrofit needs a decoder-only model, got the encoder-decoder {name} ({kind})")
    known = {kind, whole.model_type} & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if not known and name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ValueError(f"retrofit needs a causal language model (...ForCausalLM), got {name} ({kind})")
    if getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{name} ({kind}) stores its keys compressed (multi-head latent attention, kv_lora_rank {config.kv_lora_rank}), "
            "so that deleting entries would not delete what is read; take a model without it"
        )


def _check_parts(model: Any, config: Any) -> None:
    name, kind = type(model).__name__, config.model_type
    if not callable(getattr(model, "generate", None)) or model.get_output_embeddings() is None:
        raise ValueError(f"retrofit needs a causal language model with an output layer (...ForCausalLM), got {name}")
    both = getattr(config, "use_bidirectional_attention", False) in (
        True,
        "all",
    )  # "vision": among a picture's tokens only
    if both or not getattr(config, "is_causal", True):
        raise ValueError(f"retrofit needs causal attention, but {name} ({kind}) attends in both directions")
    if getattr(config, "add_cross_attention", False):
        raise ValueError(f"retrofit needs a decoder-only model, but {name} ({kind}) has cross-attention")


def _tokens(model: Any, config: Any) -> Tensor:
    """A few tokens [1, n] without special ones; more than the sliding window holds, where that is cheap."""
    window = getattr(config, "sliding_window", None)
    count = window + 8 if isinstance(window, int) and 0 < window <= LONG - 8 else SHORT
    given = [x for c in (model.config, config) for n, x in vars(c).items() if n.endswith("token_id")]
    special = {y for x in given for y in (x if isinstance(x, (list, tuple)) else [x])}
    plain = [x for x in range(int(config.vocab_size)) if x not in special] or [0]
    device = next((x.device for x in model.parameters() if x.device.type != "meta"), torch.device("cpu"))
    return torch.tensor([[plain[(7919 * i + 13) % len(plain)] for i in range(count)]], device=device)


def _probe(model: Any, config: Any, tokens: Tensor, name: str) -> Probe:
    refusal = f"{name} cannot be run as a retrofit runs it, with an ordinary cache over plain tokens: "
    with evaluated(model), refused(refusal):
        return probe(model, configs_of(model), tokens, config)


@contextlib.contextmanager
def refused(before: str, after: str = "") -> Iterator[None]:
    """A context that tells a failure of a model's forward pass in one sentence: its kind and reason between these words."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ValueError(f"{before}{type(error).__name__} ({reason[:200]}){after}") from error


@contextlib.contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """A context in which no part of the model is in training mode."""
    training = [m for m in model.modules() if m.training]
    try:
        model.eval()
        yield
    finally:
        for module in training:
            module.training = True


def _check_calls(seen: Probe, name: str) -> None:
    if not seen.calls:
        raise ValueError(
            f"{name} has no attention that goes through transformers' attention interface (ALL_ATTENTION_FUNCTIONS), so that "
            "spans cannot reach it; take a model of another family"
        )
    wrong = next((call for call in seen.calls if call.obstacle is not None), None)
    if wrong is not None:
        raise ValueError(f"{name} {wrong.obstacle}; take a model of another family")


def _check_cache(seen: Probe, layers: list[AttentionLayer], recurrent: dict[int, int], name: str) -> None:
    known = {x.index for x in layers} | set(recurrent)
    unknown = [n for n, x in enumerate(seen.cache.layers) if n not in known and not isinstance(x, EmptyLayer)]
    if unknown:
        kind = type(seen.cache.layers[unknown[0]]).__name__
        raise ValueError(
            f"{name} has a cache layer {unknown[0]} ({kind}) that no attention layer writes, which is not known"
        )


def _describe(call: AttentionCall) -> AttentionLayer:
    assert call.index is not None
    return AttentionLayer(
        call.module, call.index, call.dim, call.kv_heads, call.head_dim, call.window, call.softcap, call.sinks
    )
