"""The attention backend: vLLM's metadata of a batch becomes calls of `BlockSlots`, whose blocks are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf

from expire_span.ops.rule import FOREVER
from expire_span.vllm.slots import BlockSlots

logger = init_logger("vllm.expire_span")


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


@dataclass
class BlockMetadata:
    """A batch: requests that add one token, all together, and chunks of several tokens, one by one."""

    rows: Tensor
    """Rows of the batch's tokens [n] that are single tokens of requests."""
    blocks: Tensor
    """Their requests' blocks [n]."""
    now: Tensor
    """Their positions [n]."""
    chunks: list[tuple[int, int, int, int]]
    """First row, row after the last, position of the first, and block."""
    begun: Tensor
    """Blocks of requests that begin, or begin again after preemption."""


def read_metadata(edges: list[int], lengths: list[int], blocks: list[int], device: Any) -> BlockMetadata:
    """edges: rows at which requests begin and end; lengths: tokens of each request, these included."""
    singles, chunks, begun = [], [], []
    for first, after, length, block in zip(edges, edges[1:], lengths, blocks):
        count = after - first
        if count == 0:
            continue
        if length == count:
            begun.append(block)
        if count == 1:
            singles.append((first, block, length - 1))
        else:
            chunks.append((first, after, length - count, block))
    rows, where, now = torch.tensor(singles, dtype=torch.int64).view(-1, 3).to(device).unbind(1)
    return BlockMetadata(rows, where, now, chunks, torch.tensor(begun, dtype=torch.int64).to(device))


class ExpireBuilder(AttentionMetadataBuilder[BlockMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> BlockMetadata:
        m = common_attn_metadata
        lengths, blocks = m.seq_lens.tolist(), m.block_table_tensor[:, 0].tolist()
        return read_metadata(m.query_start_loc_cpu.tolist(), lengths, blocks, self.device)


class ExpireImpl(AttentionImpl[Any]):
    """One layer's attention. `set_up` gives it what the adapter says, once the model knows its layers."""

    slots: BlockSlots
    keep_first = 0
    evict = False
    evicted = 0
    """Living memories that were evicted because their head was full."""

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
        self._cache: int | None = None

    def set_up(self, slots: BlockSlots, keep_first: int, evict: bool, name: str) -> None:
        self.slots, self.keep_first, self.evict, self.name = slots, keep_first, evict, name

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
        m = attn_metadata
        if m is None:  # vLLM measures memory, and nothing is stored
            return output.zero_()
        if self._cache != kv_cache.data_ptr():
            self.slots.bind(kv_cache.flatten(1)[:, : self.slots.block_bytes // kv_cache.element_size()])
            self._cache = kv_cache.data_ptr()
        if len(m.begun):
            self.slots.clear(m.begun)
        if len(m.rows):
            q, k, v, new = (x[m.rows] for x in (query, key, value, span))
            new = torch.where((m.now < self.keep_first).unsqueeze(1), FOREVER, new)
            y, lost = self.slots.step(q, k, v, new, m.blocks, m.now, evict=self.evict)
            output[m.rows] = self._mark(y, lost)
        for first, after, start, block in m.chunks:
            new = span[first:after]
            kept = min(max(self.keep_first - start, 0), len(new))
            if kept:
                new = torch.cat([torch.full_like(new[:kept], FOREVER), new[kept:]])
            part = (x[first:after] for x in (query, key, value))
            y, lost = self.slots.chunk(*part, new, block, start, evict=self.evict)
            output[first:after] = y
            output[after - 1 : after] = self._mark(y[-1:], lost)
        return output

    def _mark(self, y: Tensor, lost: Tensor) -> Tensor:
        """Outputs of requests [n, ..] whose memories found no slot become NaN, and so do their logits, by which the scheduler
        learns of it. Where such memories are evicted they are counted instead."""
        if not self.evict:
            return y.masked_fill((lost > 0).view(-1, 1, 1), torch.nan)
        count = int(lost.sum())
        if count and not self.evicted:
            logger.warning(
                "Expire-Span: a head of %s has more memories than its %d slots; those with the fewest steps left are evicted",
                self.name,
                self.slots.widest,
            )
        self.evicted += count
        return y
