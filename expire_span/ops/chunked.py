"""Expiring attention in plain PyTorch over live lists: any device, training and inference.

Queries are processed in chunks, and a chunk attends only to the memories of its live list. Scores are not kept: the backward
pass recomputes them, so that the memory needed grows linearly with T. With a the softmax over living memories, m the mask and
eps = normalizer_eps:

    w = m a / (sum m a + eps),   dw = dy . v,   ds = w (dw - dy . y)   where eps = 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .lists import LiveList, live_lists
from .reference import without_unseen

_CHUNK = 128
"""Queries per chunk. Longer chunks make matrix products more efficient; shorter ones list fewer memories that most of their
queries cannot see."""


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    chunk: int = _CHUNK,
) -> Tensor:
    """Normalised inputs: span, k_pos [B, P, S] with P = 1 or Hkv, q_pos [B, 1, T]; see `expire_attention`."""
    no_keys = q.new_zeros(0, q.shape[-1]) if relative_keys is None else relative_keys
    return _forward_op(q, k, v, span, q_pos, k_pos, no_keys, ramp, causal, include_self, scale, normalizer_eps, chunk)


@dataclass
class _Problem:
    """The inputs laid out for gathering. Each of N rows has one live list, K key/value heads and K x G query heads."""

    q: Tensor  # [N, K, G, T, D]
    k: Tensor  # [N, S, K, D]
    v: Tensor  # [N, S, K, D]
    span: Tensor  # [N, S]
    q_pos: Tensor  # [N, T]
    k_pos: Tensor  # [N, S]
    relative_keys: Tensor  # [M, D]
    ramp: float
    causal: bool
    include_self: bool
    scale: float
    eps: float
    chunk: int
    finite: bool
    """Whether all keys and values are finite numbers, so that a weight of zero removes any memory."""

    def lists(self):
        return live_lists(
            self.span,
            self.q_pos,
            self.k_pos,
            ramp=self.ramp,
            causal=self.causal,
            include_self=self.include_self,
            chunk=self.chunk,
        )


def _lay_out(q, k, v, span, q_pos, k_pos, relative_keys, ramp, causal, include_self, scale, eps, chunk) -> _Problem:
    kv_heads, parts = k.shape[1], span.shape[1]
    work = torch.promote_types(q.dtype, torch.float32)
    k, v = k.to(work), v.to(work)
    finite = math.isfinite(k.sum() + v.sum())  # one of them that is not finite shows in the sum
    return _Problem(
        _rows_of_queries(q.to(work), kv_heads, parts),
        _rows_of_memories(k, parts),
        _rows_of_memories(v, parts),
        span.to(torch.promote_types(span.dtype, torch.float32)).flatten(0, 1),
        q_pos.expand(-1, parts, -1).flatten(0, 1),
        k_pos.flatten(0, 1),
        relative_keys.to(work),
        ramp,
        causal,
        include_self,
        scale,
        eps,
        chunk,
        finite,
    )


def _rows_of_queries(x: Tensor, kv_heads: int, parts: int) -> Tensor:
    """[B, Hq, T, D] -> [N, K, G, T, D] with N = B * parts."""
    x = x.unflatten(1, (parts, kv_heads // parts, -1))
    return x.flatten(0, 1)


def _rows_of_memories(x: Tensor, parts: int) -> Tensor:
    """[B, Hkv, S, D] -> [N, S, K, D]."""
    return x.unflatten(1, (parts, -1)).flatten(0, 1).transpose(1, 2).contiguous()


def _memories_of_rows(x: Tensor, batch: int) -> Tensor:
    """The inverse of `_rows_of_memories`; a view where possible."""
    return x.transpose(1, 2).unflatten(0, (batch, -1)).flatten(1, 2)


@dataclass
class _Chunk:
    """One chunk's gathered inputs and attention weights."""

    q: Tensor  # [N, K, G*C, D], scaled
    k: Tensor  # [N, K, n, D]
    v: Tensor
    weight: Tensor  # [N, K, G, C, n]
    mask: Tensor  # [N, 1, 1, C, n - full]
    softmax: Tensor | None  # unmasked weights, where eps > 0
    total: Tensor | None
    age: Tensor | None  # [N, 1, 1, C, n], where positions are relative


def _attend(p: _Problem, live: LiveList) -> _Chunk:
    """Attention weights of one chunk over its live list."""
    rows, heads, group, _, dim = p.q.shape
    q = p.q[:, :, :, live.start : live.stop]
    size = live.stop - live.start
    q = q.reshape(rows, heads, group * size, dim) * p.scale
    k, v = (live.take(x).transpose(1, 2) for x in (p.k, p.v))  # [N, K, n, D]
    mask, age = _mask(p, live)
    if not p.finite:
        k, v = without_unseen(k, v, F.pad(mask[:, 0], (live.full, 0), value=1.0))
    scores = (q @ _turned(k)).unflatten(2, (group, size))  # [N, K, G, C, n]
    if p.relative_keys.shape[0]:
        scores += _relative_scores(p, q, age, group)
    if p.eps == 0:
        scores[..., live.full :] += mask.log()
        return _Chunk(q, k, v, _softmax(scores, live, mask), mask, None, None, age)
    scores[..., live.full :].masked_fill_(mask == 0, -torch.inf)
    softmax = _softmax(scores, live, mask)
    weight = softmax.clone()
    weight[..., live.full :] *= mask
    total = weight.sum(-1, keepdim=True) + p.eps
    return _Chunk(q, k, v, weight / total, mask, softmax, total, age)


def _turned(x: Tensor) -> Tensor:
    """[N, K, n, D] -> [N, K, D, n] as a contiguous copy: CPU matrix products run up to twice as fast on it."""
    return x.transpose(-1, -2).contiguous()


def _mask(p: _Problem, live: LiveList) -> tuple[Tensor, Tensor | None]:
    """The mask of the entries that need one; and the ages of all entries if there are relative keys, else None."""
    k_pos, span = live.take(p.k_pos), live.take(p.span)
    q_pos = p.q_pos[:, live.start : live.stop, None]
    first = 0 if p.relative_keys.shape[0] else live.full
    age = q_pos - k_pos[:, None, first:]
    age = age if p.causal else age.abs()
    part = age[..., live.full - first :]
    visible = part >= 0 if p.include_self else part > 0
    if live.valid is not None:
        visible = visible & live.valid[:, None, live.full :]
    span, steps = span[:, None, live.full :], part.to(span.dtype)
    visible = visible & (span + p.ramp > steps)  # as in the definition
    mask = (1 + (span - steps) / p.ramp).clamp(0, 1)
    mask = mask.masked_fill(~visible, 0).to(p.q.dtype)
    every = age[:, None, None] if p.relative_keys.shape[0] else None
    return mask[:, None, None], every


def _softmax(scores: Tensor, live: LiveList, mask: Tensor) -> Tensor:
    """Softmax over the last dimension; zero for a query that sees no living memory."""
    weight = torch.softmax(scores, -1)
    if live.full == 0:
        weight.masked_fill_(mask.sum(-1, keepdim=True) == 0, 0)
    return weight


def _relative_index(p: _Problem, age: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    window = p.relative_keys.shape[0]
    inside = (age >= 1) & (age <= window)
    return age.clamp(1, window).sub(1).expand(shape), inside


def _relative_scores(p: _Problem, q: Tensor, age: Tensor | None, group: int) -> Tensor:
    """q . p_age for the distances that have an embedding, zero beyond. [N, K, G, C, n]."""
    assert age is not None
    table = (q @ p.relative_keys.T).unflatten(2, (group, -1))  # [N, K, G, C, M]
    index, inside = _relative_index(p, age, torch.Size((*table.shape[:-1], age.shape[-1])))
    return table.gather(-1, index).masked_fill_(~inside, 0)


@torch.library.custom_op("expire_span::chunked_forward", mutates_args=())
def _forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    relative_keys: Tensor,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    eps: float,
    chunk: int,
) -> Tensor:
    p = _lay_out(q, k, v, span, q_pos, k_pos, relative_keys, ramp, causal, include_self, scale, eps, chunk)
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    rows = _rows_of_queries(y, k.shape[1], span.shape[1])
    for live in p.lists():
        c = _attend(p, live)
        out = c.weight.flatten(2, 3) @ c.v
        rows[:, :, :, live.start : live.stop] = out.unflatten(2, (rows.shape[2], -1)).to(y.dtype)
    return y


@_forward_op.register_fake
def _(q, k, v, span, q_pos, k_pos, relative_keys, ramp, causal, include_self, scale, eps, chunk):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@torch.library.custom_op("expire_span::chunked_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    relative_keys: Tensor,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    eps: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    p = _lay_out(q, k, v, span, q_pos, k_pos, relative_keys, ramp, causal, include_self, scale, eps, chunk)
    kv_heads, parts = k.shape[1], span.shape[1]
    dys, ys = (_rows_of_queries(x.to(p.q.dtype), kv_heads, parts) for x in (dy, y))
    dq = torch.zeros_like(p.q)
    dk, dv, dspan = torch.zeros_like(p.k), torch.zeros_like(p.v), torch.zeros_like(p.span)
    drel = torch.zeros_like(p.relative_keys)
    for live in p.lists():
        _chunk_backward(p, live, dys, ys, (dq, dk, dv, dspan, drel))
    dq = dq.mul_(scale).unflatten(0, (q.shape[0], -1)).flatten(1, 3)
    dk, dv = (_memories_of_rows(x, q.shape[0]) for x in (dk, dv))
    dspan = dspan.unflatten(0, (q.shape[0], -1))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dspan.to(span.dtype), drel.to(relative_keys.dtype)


def _chunk_backward(p: _Problem, live: LiveList, dys: Tensor, ys: Tensor, grads: tuple[Tensor, ...]) -> None:
    dq, dk, dv, dspan, drel = grads
    group = p.q.shape[2]
    span = slice(live.start, live.stop)
    c = _attend(p, live)
    dy, y = dys[:, :, :, span].flatten(2, 3), ys[:, :, :, span].flatten(2, 3)  # [N, K, G*C, D]
    delta = (dy * y).sum(-1, keepdim=True).unflatten(2, (group, -1))
    live.add(dv, (c.weight.flatten(2, 3).transpose(-1, -2) @ dy).transpose(1, 2))
    ds = (dy @ _turned(c.v)).unflatten(2, (group, -1)).sub_(delta)
    dmask = _score_gradient(p, live, c, ds)  # [N, C, n - full]
    on_ramp = (c.mask > 0) & (c.mask < 1)
    fade = torch.where(on_ramp[:, 0, 0], dmask, 0).sum(1) / p.ramp
    live.add(dspan, F.pad(fade, (live.full, 0)).to(dspan.dtype))
    flat = ds.flatten(2, 3)
    live.add(dk, (flat.transpose(-1, -2) @ c.q).transpose(1, 2))
    into_q = flat @ c.k
    if p.relative_keys.shape[0]:
        into_q += _relative_backward(p, c, ds, drel)
    dq[:, :, :, span] = into_q.unflatten(2, (group, -1))


def _score_gradient(p: _Problem, live: LiveList, c: _Chunk, ds: Tensor) -> Tensor:
    """Turn ds, which holds dw - delta, into the gradient of the scores in place; return that of the mask, summed over heads."""
    if c.softmax is None:
        ds.mul_(c.weight)
        return ds[..., live.full :].sum((1, 2)) / torch.where(c.mask > 0, c.mask, 1)[:, 0, 0]
    assert c.total is not None
    ds.div_(c.total)
    dmask = (ds[..., live.full :] * c.softmax[..., live.full :]).sum((1, 2))
    ds[..., live.full :] *= c.mask
    ds.sub_((ds * c.softmax).sum(-1, keepdim=True)).mul_(c.softmax)
    return dmask


def _relative_backward(p: _Problem, c: _Chunk, ds: Tensor, drel: Tensor) -> Tensor:
    assert c.age is not None
    index, inside = _relative_index(p, c.age, ds.shape)
    table = ds.new_zeros(*ds.shape[:-1], p.relative_keys.shape[0])
    table.scatter_add_(-1, index, ds.masked_fill(~inside, 0))
    table = table.flatten(2, 3)  # [N, K, G*C, M]
    drel += table.flatten(0, 2).T @ c.q.flatten(0, 2)
    return table @ p.relative_keys


@_backward_op.register_fake
def _(dy, y, q, k, v, span, q_pos, k_pos, relative_keys, ramp, causal, include_self, scale, eps, chunk):
    parts, (batch, kv_heads, memories, dim) = span.shape[1], k.shape
    rows = (batch * parts, memories, kv_heads // parts, dim)
    dk, dv = (_memories_of_rows(torch.empty(rows, dtype=x.dtype, device=x.device), batch) for x in (k, v))
    dq, dspan, drel = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, span, relative_keys))
    return dq, dk, dv, dspan, drel


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.ramp, ctx.causal, ctx.include_self, ctx.scale, ctx.eps, ctx.chunk = inputs
    ctx.save_for_backward(output, *tensors)


def _backward(ctx, dy):
    options = (ctx.ramp, ctx.causal, ctx.include_self, ctx.scale, ctx.eps, ctx.chunk)
    dq, dk, dv, dspan, drel = _backward_op(dy, *ctx.saved_tensors, *options)
    return dq, dk, dv, dspan, None, None, drel, *(None for _ in options)


_forward_op.register_autograd(_backward, setup_context=_save)
