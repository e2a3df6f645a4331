"""What the operator's cases are compared with: `reference_attention` in float64, for each row and document apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expire_span.ops.inputs import lifetime_dtype
from expire_span.ops.reference import expiry_mask, reference_attention

SHARED = ("relative_keys", "sinks")
"""Tensors that all rows share."""
DENSE = 2**20
"""Pairs of queries and memories up to which the definition computes a document in one piece."""
WEIGHTS = 2**17
"""Pairs up to which single weights are computed to see how exact the gradient of spans can be."""
BLOCK = 256
"""Queries per piece of the definition in longer documents."""


@dataclass
class Problem:
    """The tensors of a case; `exact` holds the same values in float64, `ids` the documents of queries and memories."""

    given: dict[str, Tensor]
    options: dict[str, Any]
    ids: tuple[Tensor, Tensor]
    unseen: Tensor
    """Memories that no query sees, [B, Hkv, S]."""
    direction: Tensor


def define(p: Problem, case: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Output and gradients by `reference_attention` with values in `dtype`: for each row and document apart, in pieces.

    Where float32 would round a memory away or bring it back, lifetimes are computed in float64 in any dtype: an implementation
    that does so must not widen its own budget.
    """
    x = p.given
    work = torch.promote_types(dtype, torch.float32)
    names = [n for n in ("q", "k", "v", "span", *SHARED) if n in x]
    sums = {n: torch.zeros(x[n].shape, dtype=torch.float64 if dtype == torch.float64 else work) for n in names}
    span = _lifetimes(x)
    sums["span"] = torch.zeros_like(span, dtype=torch.float64)
    y = torch.zeros(x["q"].shape, dtype=dtype)
    terms = {n: torch.zeros(t.shape, dtype=torch.float64) for n, t in sums.items()}
    for piece in _pieces(p, span):
        _define_piece(p, case, dtype, span, piece, y, sums, terms)
    out = {"y": y} | {f"d{n}": t for n, t in sums.items()}
    rows = x["span"].shape[1] if x["span"].dim() == 3 else 0
    out["dspan"], terms["span"] = (_to_rows(t, rows) for t in (out["dspan"], terms["span"]))
    if dtype == torch.float64:
        return out | {f"terms of d{n}": t for n, t in terms.items()}
    return {n: _rounded_like(t, n, p) for n, t in out.items()}


def _rounded_like(t: Tensor, name: str, p: Problem) -> Tensor:
    """A gradient has the dtype of its input; where that is float64, float32 measures the error."""
    like = p.given.get(name.removeprefix("d"), p.given["q"])
    return t.to(torch.float32 if like.dtype == torch.float64 else like.dtype)


def _lifetimes(x: dict[str, Tensor]) -> Tensor:
    """Spans [B, Hkv, S] in the dtype in which the operator computes lifetimes."""
    span, kv_heads = x["span"].to(lifetime_dtype(x["span"], x["q"])), x["k"].shape[1]
    span = span.unsqueeze(1) if span.dim() == 2 else span
    return torch.cat([span, span[:, -1:].expand(-1, kv_heads - span.shape[1], -1)], 1)


def _to_rows(grad: Tensor, rows: int) -> Tensor:
    """Gradients of spans [B, Hkv, S] summed over the heads that share them, [B, rows, S], or [B, S] for 0."""
    if rows == 0:
        return grad.sum(1)
    return torch.cat([grad[:, : rows - 1], grad[:, rows - 1 :].sum(1, keepdim=True)], 1)


def _pieces(p: Problem, span: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(row, queries, memories): pieces of one document, with all memories that any of these queries may see."""
    x, (q_ids, k_ids) = p.given, p.ids
    for row in range(len(x["q"])):
        found, counts = q_ids[row].unique_consecutive(return_counts=True)
        begins, ends = (
            torch.searchsorted(k_ids[row].contiguous(), found, right=right).tolist() for right in (False, True)
        )
        for queries, begin, end in zip(torch.arange(len(q_ids[row])).split(counts.tolist()), begins, ends):
            memories = torch.arange(begin, end)
            if len(queries) * len(memories) <= DENSE:
                yield row, queries, memories
            else:
                yield from ((row, part, _near(p, row, part, memories, span)) for part in queries.split(BLOCK))


def _near(p: Problem, row: int, queries: Tensor, memories: Tensor, span: Tensor) -> Tensor:
    """Those memories that any of the queries may see, and some that none does."""
    k_pos, q_pos = _k_pos(p.given, row)[:, memories], _q_pos(p.given, row)[queries]
    reach = span[row][:, memories].double() + p.options["ramp"] + 1
    ahead = 0 if p.options["causal"] else reach
    near = (k_pos + reach >= q_pos[0]) & (k_pos - ahead <= q_pos[-1])
    return memories[near.any(0)]


def _k_pos(x: dict[str, Tensor], row: int) -> Tensor:
    """Positions [Hkv, S] of a row's memories."""
    k_pos = x["k_pos"][row] if x["k_pos"].dim() > 1 else x["k_pos"]
    return k_pos.expand(x["k"].shape[1], -1)


def _q_pos(x: dict[str, Tensor], row: int) -> Tensor:
    return x["q_pos"][row] if x["q_pos"].dim() > 1 else x["q_pos"]


def _define_piece(p, case, dtype, span, piece, y, sums, terms) -> None:
    row, queries, memories = piece
    x, one = p.given, slice(row, row + 1)
    leaves = {"q": x["q"][one][:, :, queries], "k": x["k"][one][:, :, memories], "v": x["v"][one][:, :, memories]}
    leaves |= {name: x[name] for name in SHARED if name in x}
    leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
    mine = span[one][:, :, memories].detach()
    q_pos = _q_pos(x, row)[queries].expand(1, x["k"].shape[1], -1)
    k_pos = _k_pos(x, row)[None][:, :, memories]
    o = p.options
    wide = mine.double() if x["span"].dtype == torch.float64 or x["q"].dtype != torch.float64 else mine
    if dtype != torch.float64 and _same_edges(*(age_mask(t, q_pos, k_pos, o) for t in (wide, mine.float()))):
        wide = mine.float()
    leaves["span"] = wide.clone().requires_grad_()
    options = {n: o[n] for n in ("ramp", "causal", "include_self", "normalizer_eps", "softcap")}
    scale = 1 / math.sqrt(x["q"].shape[-1]) if o["scale"] is None else o["scale"]
    out = reference_attention(**leaves, q_pos=q_pos, k_pos=k_pos, scale=scale, **options)
    y[one, :, queries] = out.detach()
    if not case["grad"] or not len(memories):
        return
    into = torch.autograd.grad(
        out, list(leaves.values()), p.direction[one][:, :, queries].to(out.dtype), allow_unused=True
    )
    for name, grad in zip(leaves, into):
        if grad is None:
            continue
        if name in SHARED:
            sums[name] += grad
        else:
            sums[name][one].index_add_(2, queries if name == "q" else memories, grad.to(sums[name].dtype))
    if dtype == torch.float64:
        at = dict(q_pos=q_pos, k_pos=k_pos, scale=scale, **options)
        sizes = _sizes_of_terms(
            leaves, p.direction[one][:, :, queries], at, age_mask(wide, q_pos, k_pos, o), x["q"].dtype
        )
        for name, size in sizes.items():
            if name in SHARED:
                terms[name] += size
            else:
                terms[name][one].index_add_(2, queries if name == "q" else memories, size)


def _sizes_of_terms(
    leaves: dict[str, Tensor], dy: Tensor, options: dict[str, Any], mask: Tensor, given: torch.dtype
) -> dict[str, Tensor]:
    """Sums of the sizes of the terms of the gradients, that of v apart, in units of float32's rounding.

    Where a query sees almost nothing but one memory, the terms cancel: `scale sum_i w_i (dy . v_i - dy . y) k_i` for q. The y
    of that formula is the output that was returned, rounded to the dtype that was given, as in FlashAttention.
    """
    x = {n: t.detach().double() for n, t in leaves.items()}
    q, k, scale = x["q"], x["k"], abs(options["scale"])
    coarse = torch.finfo(given).eps / torch.finfo(torch.float32).eps if given.itemsize == 2 else 0.0
    rounded = coarse * (dy.double() * reference_attention(**x, **options)).norm(dim=-1, keepdim=True)
    dy, long = dy.double().norm(dim=-1, keepdim=True), x["v"].norm(dim=-1, keepdim=True)
    values = torch.cat([long * k.abs(), k.abs(), long], -1).requires_grad_()
    with torch.enable_grad():
        seen = reference_attention(**x | {"v": values}, **options)
    both, keys, mean = seen.detach().split([k.shape[-1], k.shape[-1], 1], -1)
    delta = dy * mean + rounded
    into = torch.cat([dy * q.abs(), delta * q.abs(), torch.zeros_like(mean)], -1)
    alone, joint, _ = torch.autograd.grad(seen, values, into)[0].split([k.shape[-1], k.shape[-1], 1], -1)
    faded = torch.where(mask % 1 != 0, 1 / (mask * options["ramp"]), 0).repeat_interleave(q.shape[1] // k.shape[1], 1)
    if faded[0, 0].numel() <= WEIGHTS:  # in longer pieces, no weight is above 1
        one = torch.eye(k.shape[2], dtype=torch.float64).expand(*k.shape[:2], -1, -1)
        faded = faded * reference_attention(**x | {"v": one}, **options)
    of_value, of_y = ((size.mT @ faded).unflatten(1, (k.shape[1], -1)).sum(2) for size in (dy, delta))  # [1, Hkv, 1, S]
    fades = (of_value * long.mT + of_y).squeeze(2)
    found = {"span": fades, "q": scale * (dy * both + delta * keys), "k": scale * (long * alone + joint)}
    if "sinks" in x:  # a weight is as exact as the scores that it comes from
        weight = 1 - reference_attention(**x | {"v": torch.ones_like(long)}, **options).detach()
        scores = scale * q.norm(dim=-1, keepdim=True) * k.norm(dim=-1).max() + x["sinks"].abs().view(-1, 1, 1)
        found["sinks"] = (weight * delta * (1 + scores)).sum((0, 2, 3))
    if "relative_keys" in x:
        total = 2 * scale * (delta * q.abs()).sum((0, 1, 2))
        found["relative_keys"] = total.expand_as(x["relative_keys"]) / len(x["relative_keys"]) ** 0.5
    return found


def _same_edges(a: Tensor, b: Tensor) -> bool:
    """Whether the same memories are dead, on their ramp and of full weight."""
    return bool(torch.equal(a > 0, b > 0) and torch.equal(a >= 1, b >= 1))


def age_mask(span: Tensor, q_pos: Tensor, k_pos: Tensor, o: dict[str, Any]) -> Tensor:
    age = q_pos.unsqueeze(-1) - k_pos.unsqueeze(-2)
    return expiry_mask(span, age if o["causal"] else age.abs(), ramp=o["ramp"], include_self=o["include_self"])


def find_unseen(x: dict[str, Tensor], o: dict[str, Any], ids: tuple[Tensor, Tensor]) -> Tensor:
    """Memories that no query sees; few for long cases, where they are not looked for."""
    batch, kv_heads, total, _ = x["k"].shape
    if batch * total * x["q"].shape[2] > DENSE:
        return torch.zeros(batch, kv_heads, total, dtype=torch.bool)
    span = _lifetimes(x).double()
    k_pos = x["k_pos"] if x["k_pos"].dim() == 3 else x["k_pos"].expand(batch, -1).unsqueeze(1)
    mask = age_mask(span, x["q_pos"].expand(batch, -1).unsqueeze(1), k_pos, o)
    same = ids[0][:, None, :, None] == ids[1][:, None, None, :]
    return ((mask > 0) & same).logical_not().all(-2).expand(batch, kv_heads, -1)
