"""Packed documents: several texts in one row, between which there is no attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import as_boundaries

Documents = Tensor | tuple[Tensor, Tensor]
Boundaries = Tensor | Sequence[int]

_FAR_APART = 2**40
"""Distance in steps between two documents after `move_apart`: longer than any lifetime."""


def document_ids(
    documents: Documents | None, cu_seqlens: Boundaries | None, q: Tensor, memories: int, check: bool
) -> tuple[Tensor, Tensor] | None:
    """Document ids of queries [B, T] and of memories [B, S], or None where nothing is packed."""
    if documents is None and cu_seqlens is None:
        return None
    if documents is not None and cu_seqlens is not None:
        raise ValueError("documents and cu_seqlens say the same thing in two ways; give one of them")
    if cu_seqlens is not None:
        bounds = as_boundaries(cu_seqlens, q.shape[2], memories, check)
        documents = _ids_from_boundaries(bounds.to(q.device), q.shape[2])
    pair = documents if isinstance(documents, tuple) else (documents, documents)
    if len(pair) != 2:
        raise ValueError(f"documents must be one tensor or two, of the queries and of the memories, got {len(pair)}")
    wanted = (("queries", q.shape[2]), ("memories", memories))
    return tuple(_expand(ids, q, *want, check) for ids, want in zip(pair, wanted))  # type: ignore[return-value]


def _ids_from_boundaries(cu_seqlens: Tensor, queries: int) -> Tensor:
    """Boundaries as document ids: [0, 3, 7] -> 1 1 1 2 2 2 2."""
    index = torch.arange(queries, device=cu_seqlens.device)
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


def move_apart(
    documents: tuple[Tensor, Tensor], span: Tensor, q_pos: Tensor, k_pos: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Span and positions [B, P, .] with documents shifted so far apart that no memory is alive for another document's query."""
    q_rank, k_rank = (rank.unsqueeze(1) for rank in _ranks(*documents))
    return span.clamp_max(_FAR_APART / 4), q_pos + q_rank * _FAR_APART, k_pos + k_rank * _FAR_APART


def _ranks(q_doc: Tensor, k_doc: Tensor) -> tuple[Tensor, Tensor]:
    """Renumber document ids 0, 1, 2, .. in each row's order, since any integers are allowed and large ones would overflow."""
    ordered = torch.cat([q_doc, k_doc], 1).sort(1).values
    q_rank, k_rank = (torch.searchsorted(ordered, ids.contiguous()) for ids in (q_doc, k_doc))
    return q_rank, k_rank
