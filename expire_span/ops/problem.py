"""The inputs of the chunked operator, laid out so that a chunk's memories can be gathered."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .lists import LiveList, live_lists

QUERIES = 768
"""Number of queries per call on a CPU: enough that call overhead is small, few enough that their scores stay in the cache."""
FUSED_FROM = 256
"""The smallest chunk that PyTorch's fused attention computes."""


@dataclass
class Problem:
    """The operator's inputs, reshaped so that memories with the same span can be gathered together.

    There are N = B x P rows, where P is the number of rows of spans per batch row. Each has one live list, K key/value heads
    and K x G query heads.
    """

    q: Tensor  # [N, K, G, T, D]
    k: Tensor  # [N, K, S, D]
    v: Tensor  # [N, K, S, D]
    span: Tensor  # [N, S]
    q_pos: Tensor  # [N, T]
    k_pos: Tensor  # [N, S]
    q_doc: Tensor | None  # [N, T], ids of packed documents
    k_doc: Tensor | None  # [N, S]
    relative_keys: Tensor  # [M, D]
    ramp: float
    causal: bool
    include_self: bool
    scale: float
    eps: float
    chunk: int
    softcap: float
    sinks: Tensor  # [N, K, G, 1, 1], or empty
    finite: bool
    """Whether all keys and values are finite, so that a weight of zero removes a memory (0 times NaN would be NaN)."""

    @property
    def fuses(self) -> bool:
        """Whether PyTorch's fused CPU attention can compute this."""
        plain = self.eps == 0 and self.softcap == 0 and not self.sinks.numel() and not self.relative_keys.shape[0]
        return self.q.device.type == "cpu" and self.finite and plain

    @property
    def fuses_chunks(self) -> bool:
        """Whether it is used for chunks. For short ones it takes twice as long as batched matrix products."""
        return self.fuses and self.chunk >= FUSED_FROM

    @property
    def together(self) -> int:
        """Number of chunks that are computed in one call."""
        return max(1, QUERIES // (self.chunk * len(self.span))) if self.q.device.type == "cpu" else 1

    @property
    def never_expires(self) -> bool:
        """Whether this is plain causal attention: queries and memories have the same positions, and no memory fades. PyTorch's
        kernel of it multiplies the minus infinity of later memories by the scale, which therefore must be positive."""
        if (
            self.scale <= 0
            or self.q_doc is not None
            or not (self.causal and self.include_self and self.q_pos.shape == self.k_pos.shape and self.k_pos.shape[1])
        ):
            return False
        last = (self.q_pos[:, -1:] - self.k_pos).to(self.span.dtype)
        rises = bool((self.k_pos.diff() > 0).all())
        return rises and torch.equal(self.q_pos, self.k_pos) and bool((self.span >= last).all())

    def lists(self) -> Iterator[LiveList]:
        return live_lists(
            self.span,
            self.q_pos,
            self.k_pos,
            ramp=self.ramp,
            causal=self.causal,
            include_self=self.include_self,
            chunk=self.chunk,
            together=self.together,
            documents=None if self.q_doc is None or self.k_doc is None else (self.q_doc, self.k_doc),
        )


def lay_out(
    q,
    k,
    v,
    span,
    q_pos,
    k_pos,
    q_doc,
    k_doc,
    relative_keys,
    sinks,
    ramp,
    causal,
    include_self,
    scale,
    eps,
    softcap,
    chunk,
) -> Problem:
    kv_heads, parts = k.shape[1], span.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(work), v.to(work)
    finite = math.isfinite(k.sum() + v.sum())  # a sum with a NaN or infinite term is not finite
    return Problem(
        rows_of_queries(q.to(work), kv_heads, parts),
        rows_of_memories(k, parts),
        rows_of_memories(v, parts),
        span.to(torch.promote_types(span.dtype, torch.float32)).flatten(0, 1),
        q_pos.expand(-1, parts, -1).flatten(0, 1),
        k_pos.flatten(0, 1),
        None if q_doc is None else q_doc.repeat_interleave(parts, 0),
        None if k_doc is None else k_doc.repeat_interleave(parts, 0),
        relative_keys.to(work),
        ramp,
        causal,
        include_self,
        scale,
        eps,
        chunk,
        softcap,
        rows_of_queries(sinks.to(work).view(1, -1, 1, 1).expand(len(q), -1, 1, 1), kv_heads, parts)
        if len(sinks)
        else sinks,
        finite,
    )


def rows_of_queries(x: Tensor, kv_heads: int, parts: int) -> Tensor:
    """[B, Hq, T, D] -> [N, K, G, T, D] with N = B * parts, where `parts` is the number of rows of spans per batch row."""
    x = x.unflatten(1, (parts, kv_heads // parts, -1))
    return x.flatten(0, 1)


def rows_of_memories(x: Tensor, parts: int) -> Tensor:
    """[B, Hkv, S, D] -> [N, K, S, D]."""
    return x.unflatten(1, (parts, -1)).flatten(0, 1).contiguous()


def memories_of_rows(x: Tensor, batch: int) -> Tensor:
    """The inverse of `rows_of_memories`."""
    return x.unflatten(0, (batch, -1)).flatten(1, 2)
