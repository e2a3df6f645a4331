"""The layout of a layer's cache as vLLM plans it: one block per request, for the request's whole life."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.kv_cache_interface import CircularBufferSpec

ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class ExpireSpec(CircularBufferSpec):
    """A block whose content only `BlockSlots` knows: for vLLM it is one cell of so many bytes, which stands for all tokens of a
    request."""


def make_spec(block_bytes: int, kv_heads: int, head_size: int, dtype: torch.dtype, most_tokens: int) -> ExpireSpec:
    # The runner computes a place in the block table for every token, by its position over block_size. With a block that is
    # longer than any request, this is always the first, and only, entry.
    tokens = -(-max(most_tokens, 1) // ALIGNMENT) * ALIGNMENT
    return ExpireSpec(
        block_size=tokens,
        num_kv_heads=kv_heads,
        head_size=head_size,
        dtype=dtype,
        num_head_slots=1,
        tokens_per_state=tokens,
        state_content_bytes=block_bytes,
        dcp_sharded=False,
    )
