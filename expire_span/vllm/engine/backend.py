"""The attention backend: vLLM's metadata of a batch becomes calls of `BlockAttention`, whose blocks are vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf

from expire_span.vllm.batches import BlockAttention, BlockMetadata, read_batch


class ExpireBackend(AttentionBackend):
    supported_dtypes = (torch.float32, torch.bfloat16, torch.float16)
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # must be a member of vLLM's AttentionBackendEnum

    @staticmethod
    def get_impl_cls() -> type[ExpireImpl]:
        return ExpireImpl

    @staticmethod
    def get_builder_cls() -> type[ExpireBuilder]:
        return ExpireBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(spec: Any = None) -> list[Any]:
        return [MultipleOf(1)]


class ExpireBuilder(AttentionMetadataBuilder[BlockMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> BlockMetadata:
        return read_batch(common_attn_metadata, self.device)


class ExpireImpl(BlockAttention, AttentionImpl[Any]):
    """One layer's attention, as vLLM makes and calls it."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        if alibi_slopes or logits_soft_cap or kv_sharing_target_layer_name or extra or attn_type != "decoder":
            found = dict(
                alibi=alibi_slopes, soft_cap=logits_soft_cap, shared=kv_sharing_target_layer_name, kind=attn_type
            )
            raise ValueError(f"expiring attention is plain causal attention, got {found | extra}")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: BlockMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
        *,
        span: Tensor,
    ) -> Tensor:
        """query [rows, Hq, D], key and value [rows, Hkv, D], span [rows, Hkv] -> output [rows, Hq, D]."""
        if attn_metadata is None:  # vLLM measures memory, and nothing is stored
            return output.zero_()
        return self.attend(query, key, value, span, kv_cache, attn_metadata, output)
