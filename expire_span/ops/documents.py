"""Packed documents: several texts in one row, between which there is no attention.

Every implementation compares document ids with each other, as integers, and leaves positions and lifetimes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import as_boundaries

Documents = Tensor | tuple[Tensor, Tensor]
Boundaries = Tensor | Sequence[int]


def document_ids(
    documents: Documents | None,
    cu_seqlens: Boundaries | None,
    q: Tensor,
    memories: int,
    check: bool,
    part: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Document ids of queries [B, T] and of memories [B, S], or None where nothing is packed.

    part: the place of the first query in the sequence to which boundaries belong, and its length; 0 and T by default.
    """
    if documents is None and cu_seqlens is None:
        return None
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens say the same thing in two ways; give one of them")
    if cu_seqlens is not None:
        first, whole = part or (0, q.shape[2])
        bounds = as_boundaries(cu_seqlens, whole, whole + memories - q.shape[2], check)
        documents = _ids_from_boundaries(bounds.to(q.device), first, q.shape[2])
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2:
        raise ValueError(f"documents must be one tensor or two, of the queries and of the memories, got {len(pair)}")
    wanted = (("queries", q.shape[2]), ("memories", memories))
    return tuple(_expand(ids, q, *want, check) for ids, want in zip(pair, wanted))  # type: ignore[return-value]


def _ids_from_boundaries(cu_seqlens: Tensor, first: int, queries: int) -> Tensor:
    """Boundaries as document ids, of `queries` tokens from `first` on: [0, 3, 7] -> 1 1 1 2 2 2 2."""
    index = torch.arange(first, first + queries, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), index, right=True)


def _expand(ids: Tensor | None, q: Tensor, what: str, count: int, check: bool) -> Tensor:
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"documents of {what} must be a tensor, got {type(ids).__name__}; give ids as a tensor, or a tuple of two tensors"
        )
    batch = q.shape[0]
    if ids.is_floating_point() or ids.is_complex() or tuple(ids.shape) not in ((count,), (batch, count)):
        got = f"{tuple(ids.shape)} of {ids.dtype}"
        raise ValueError(f"documents of {what} must be integers of shape ({count},) or ({batch}, {count}), got {got}")
    if ids.device != q.device:
        raise ValueError(f"documents of {what} are on {ids.device} but q is on {q.device}; move them to one device")
    if check and bool((ids[..., 1:] < ids[..., :-1]).any()):
        raise ValueError(f"documents of {what} must not decrease along a row; give the documents increasing ids")
    return ids.long().expand(batch, count)
