"""A causal language model of transformers, run by vLLM's own backend for them, whose attention layers forget."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.model_executor.models.transformers.base import VLLM_ATTN_ATTR
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name, direct_register_custom_op

from expire_span.disk.sizes import show_bytes
from expire_span.hf.probing import is_rotary
from expire_span.hf.rotary import use_exact_angles
from expire_span.ops.slots import SpanForm
from expire_span.vllm.adapter import check_weights, predict_spans, read_adapter, slice_heads
from expire_span.vllm.options import Options, read_options
from expire_span.vllm.slots import BlockSlots

from .backend import ExpireBackend
from .spec import ExpireSpec, make_spec

logger = init_logger("vllm.expire_span")

HARD_EDGE = 0.5
"""The ramp of a window's memories, shorter than one step; see hf/retrofitted.py."""


def expire_attention(
    query: Tensor, key: Tensor, value: Tensor, span: Tensor, output: Tensor, layer_name: LayerNameType
) -> None:
    """Like vLLM's unified_attention_with_output. The spans are an argument, so that torch.compile sees where they come from;
    as an attribute of the layer they would be recorded once."""
    metadata, layer, cache, _ = get_attention_context(_resolve_layer_name(layer_name))
    layer.impl.forward(layer, query, key, value, cache, metadata, output=output, span=span)


direct_register_custom_op(
    op_name="expire_attention", op_func=expire_attention, mutates_args=["output"], fake_impl=lambda *args: None
)


class ExpireAttention(Attention):
    """One layer: spans are predicted from the layer's hidden states by the hook of `ExpireSpanForCausalLM`."""

    span: Tensor
    block_bytes: int
    """Bytes of a block; with tensor parallelism those of the process whose heads have most slots, since all must be equal."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, attn_backend=ExpireBackend)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Tensor:  # type: ignore[override]
        rows = query.shape[0]
        query = query.view(rows, self.num_heads, self.head_size)
        key, value = (x.view(rows, self.num_kv_heads, self.head_size) for x in (key, value))
        output = torch.empty_like(query)
        name = _encode_layer_name(self.layer_name)
        torch.ops.vllm.expire_attention(query, key, value, self.span, output, name)
        return output.view(rows, -1)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> ExpireSpec:
        most = vllm_config.model_config.max_model_len
        return make_spec(self.block_bytes, self.num_kv_heads, self.head_size, self.kv_cache_torch_dtype, most)


class ExpireSpanForCausalLM(TransformersForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        options = read_options(vllm_config.additional_config)
        adapter = read_adapter(options.adapter)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.adapter = adapter
        self.angles = use_exact_angles([x for x in self.model.modules() if is_rotary(x)])
        self.attentions: list[ExpireAttention] = []
        for module in self.model.modules():
            if isinstance(getattr(module, VLLM_ATTN_ATTR, None), ExpireAttention):
                self.attentions.append(self._set_up(module, options))
        self._tell_size()

    def _get_attn_cls(self) -> type[ExpireAttention]:
        return ExpireAttention

    def _set_up(self, module: Any, options: Options) -> ExpireAttention:
        """Give an attention layer its predictor, its window or its slots."""
        attention: ExpireAttention = getattr(module, VLLM_ATTN_ATTR)
        config, layer = self.adapter.config, module.layer_idx
        window, most = find_window(module, self.text_config), self.model_config.max_model_len
        own, first = attention.num_kv_heads, self._first_head()
        if window is None:
            heads = self.model_config.get_total_num_kv_heads()
            form = slice_heads(self.adapter.span_form(layer, self.text_config.hidden_size, heads), first, own)
            every = self.adapter.capacities(layer, heads, options, most)
            evict = options.when_full == "evict" or (config.cap is not None and max(every) == config.cap)
            ramp, keep_first = float(config.ramp), config.keep_first
        else:
            form = SpanForm.constant(torch.full((own,), window - 1.0), self.text_config.hidden_size)
            every, evict, ramp, keep_first = [max(1, min(window - 1, most))] * own, False, HARD_EDGE, 0
            first = 0
        slots = BlockSlots(
            every[first : first + own],
            attention.head_size,
            ramp=ramp,
            scale=attention.impl.scale,
            dtype=attention.kv_cache_torch_dtype,
        )
        attention.block_bytes = slots.bytes_for(max(sum(every[n : n + own]) for n in range(0, len(every), own)))
        attention.impl.set_up(slots, keep_first, evict, attention.layer_name)
        attention.form = SpanForm(*(x.to(self.device_config.device) for x in form))
        module.register_forward_pre_hook(predict_before(attention), with_kwargs=True)
        return attention

    def _first_head(self) -> int:
        """The first of the key/value heads that this process has."""
        heads = self.model_config.get_total_num_kv_heads()
        return get_tensor_model_parallel_rank() * heads // self.tp_group.world_size

    def _tell_size(self) -> None:
        """Say what a request takes, beside the cache that vLLM would give it without the plugin."""
        most = self.model_config.max_model_len
        counts = [n for x in self.attentions for n in x.impl.slots.capacity]
        ours = sum(x.block_bytes for x in self.attentions)
        full = sum(2 * x.num_kv_heads * x.head_size * x.kv_cache_torch_dtype.itemsize for x in self.attentions) * most
        logger.info(
            "Expire-Span: a request holds %s, whatever its length (%s slots a head); vLLM's own cache holds %s for %d tokens, "
            "%.1f times as much",
            show_bytes(ours),
            f"{min(counts)} to {max(counts)}",
            show_bytes(full),
            most,
            full / ours,
        )

    @property
    def evicted(self) -> int:
        """Living memories that were evicted because their head was full, since the start."""
        return sum(x.impl.evicted for x in self.attentions)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(check_weights(weights, self.adapter, self._get_tie_word_embeddings()))


def predict_before(attention: ExpireAttention) -> Any:
    """A hook that predicts the spans of the hidden states which an attention layer gets."""

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        attention.span = predict_spans(hidden.reshape(-1, hidden.shape[-1]), attention.form)

    return before


def find_window(module: Any, config: Any) -> int | None:
    """The layer's own sliding window in tokens, the query's included; as in hf/layouts.py."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
