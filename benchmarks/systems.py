"""The systems that are timed, each as a function of the same inputs: our operator and its alternatives.

Dense causal attention (cuDNN's and flash) computes another function, without expiry; it is the baseline. FlexAttention computes
ours: the expiry is a score modification whose captured spans get gradients, with a block mask built exactly from the spans.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from expire_span.ops import expire_attention

from .workloads import RAMP

Inputs = dict[str, Any]
System = Callable[[Inputs], Tensor]
FLEX_BLOCK = 128
TINY = 1e-20
"""Least value of the mask before its logarithm is taken, so that 0 x inf cannot occur; the block mask removes dead memories."""


def ours(x: Inputs) -> Tensor:
    impl = "triton" if x["q"].is_cuda else "chunked"
    return expire_attention(**x, ramp=RAMP, impl=impl, check_values=False)


def reference(x: Inputs) -> Tensor:
    return expire_attention(**x, ramp=RAMP, impl="reference", check_values=False)


def cudnn(x: Inputs) -> Tensor:
    """cuDNN's causal attention on a GPU; PyTorch's plain one elsewhere."""
    return _dense(x, SDPBackend.CUDNN_ATTENTION if x["q"].is_cuda else SDPBackend.MATH)


def flash(x: Inputs) -> Tensor:
    return _dense(x, SDPBackend.FLASH_ATTENTION)


def _dense(x: Inputs, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(x["q"], x["k"], x["v"], is_causal=True)


SYSTEMS: dict[str, System] = {"ours": ours, "cudnn": cudnn, "flash": flash, "reference": reference}
EXPIRES = ("ours", "reference", "flex")
"""Systems whose result is expiring attention; the others are dense."""


def inputs_of(system: str, x: Inputs, learn_span: bool = True) -> list[Tensor]:
    """The inputs that get a gradient."""
    names = ("q", "k", "v", "span") if system in EXPIRES and learn_span else ("q", "k", "v")
    return [x[name] for name in names]


@dataclass
class Flex:
    """FlexAttention with learned expiry. The block mask belongs to one set of spans and is built outside the timing."""

    compiled: bool = True
    learn_span: bool = True

    def __post_init__(self) -> None:
        self.attend = flex_attention
        if self.compiled:
            limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
            setattr(torch._dynamo.config, limit, 64)
            self.attend = torch.compile(flex_attention, dynamic=False)

    def prepare(self, x: Inputs) -> System:
        mask = expiry_blocks(x["span"].detach())

        def run(x: Inputs) -> Tensor:
            span = x["span"] if self.learn_span else x["span"].detach()

            def fade(score, b, h, q_idx, kv_idx):
                left = 1 + (span[b, kv_idx] - (q_idx - kv_idx)) / RAMP
                return score + torch.log(torch.clamp(left, TINY, 1.0))

            return self.attend(x["q"], x["k"], x["v"], score_mod=fade, block_mask=mask)  # type: ignore[return-value]

        return run


def expiry_blocks(span: Tensor) -> BlockMask:
    """The block mask of spans [B, T], computed without a tensor of size T x T.

    Block (a, j) of queries and memories is needed if a memory of j outlives the first query of a, and it is full if all of its
    memories are born before its first query and alive for its last one.
    """
    batch, length = span.shape
    blocks = -(-length // FLEX_BLOCK)
    pos = torch.arange(length, device=span.device)
    death = torch.nn.functional.pad(pos + span + RAMP, (0, blocks * FLEX_BLOCK - length), value=-1.0)
    death = death.view(batch, 1, 1, blocks, FLEX_BLOCK)
    a = torch.arange(blocks, device=span.device)[:, None]
    j = torch.arange(blocks, device=span.device)[None]
    alive = (a >= j) & (death.amax(-1) > a * FLEX_BLOCK)  # [B, 1, query blocks, memory blocks]
    full = (a > j) & (death.amin(-1) > a * FLEX_BLOCK + FLEX_BLOCK - 1)
    full &= (a + 1) * FLEX_BLOCK <= length

    def sees(b, h, q_idx, kv_idx):
        age = q_idx - kv_idx
        return (age >= 0) & (age < span[b, kv_idx] + RAMP)

    return BlockMask.from_kv_blocks(
        *_ordered(alive & ~full), *_ordered(full), BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts and indices of the marked blocks of each row, the marked ones first."""
    order = blocks.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).to(torch.int32), order.to(torch.int32).contiguous()
