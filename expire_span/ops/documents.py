"""Packed documents: several texts in one row, none of which sees another."""

from __future__ import annotations

import torch
from torch import Tensor

Documents = Tensor | tuple[Tensor, Tensor]

_FAR_APART = 2**40
"""Steps between two documents once they are moved apart: no span reaches across."""


def document_ids(
    documents: Documents | None, cu_seqlens: Tensor | None, batch: int, queries: int, memories: int, check: bool
) -> tuple[Tensor, Tensor] | None:
    """Document ids of queries [B, T] and of memories [B, S], or None where nothing is packed."""
    if documents is None and cu_seqlens is None:
        return None
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens say the same thing in two ways; give one of them")
    if cu_seqlens is not None:
        documents = _ids_from_boundaries(cu_seqlens, queries)
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    wanted = (("queries", queries), ("memories", memories))
    return tuple(_expand(ids, batch, *want, check) for ids, want in zip(pair, wanted))  # type: ignore[return-value]


def _ids_from_boundaries(cu_seqlens: Tensor, queries: int) -> Tensor:
    """[0, 3, 7] -> 0 0 0 1 1 1 1."""
    index = torch.arange(queries, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous().to(index.dtype), index, right=True)


def _expand(ids: Tensor | None, batch: int, what: str, count: int, check: bool) -> Tensor:
    assert ids is not None
    if ids.is_floating_point() or tuple(ids.shape) not in ((count,), (batch, count)):
        got = f"{tuple(ids.shape)} of {ids.dtype}"
        raise ValueError(f"documents of {what} must be integers of shape ({count},) or ({batch}, {count}), got {got}")
    if check and bool((ids[..., 1:] < ids[..., :-1]).any()):
        raise ValueError(f"documents of {what} must not fall along a row; give the documents rising ids")
    return ids.long().expand(batch, count)


def move_apart(
    documents: tuple[Tensor, Tensor], span: Tensor, q_pos: Tensor, k_pos: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Span and positions [B, P, .] with the documents so far apart that each is dead, or unborn, to every other."""
    q_doc, k_doc = (ids.unsqueeze(1) for ids in documents)
    return span.clamp_max(_FAR_APART / 4), q_pos + q_doc * _FAR_APART, k_pos + k_doc * _FAR_APART
