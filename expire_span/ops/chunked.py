"""Expiring attention in plain PyTorch over live lists: any device, training and inference.

Queries are processed in chunks, and a chunk attends only to the memories of its live list. Scores are not stored: the backward
pass recomputes them, so that memory use grows linearly with T. With a the softmax over living memories, m the mask, w the
attention weights, s the scores and eps = normalizer_eps, the forward pass and, for eps = 0, the gradient of the scores are

    w = m a / (sum m a + eps),   dw = dy . v,   ds = w (dw - dy . y)

The letters N, K, G, C, R and n in shapes are those of `Problem` and `LiveList`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from . import fused, rule
from .decode import softmax_with_sinks
from .lists import LiveList
from .problem import Problem, lay_out, memories_of_rows, rows_of_queries
from .reference import without_unseen

_CHUNK, _SHORT_CHUNK, _LONG_CHUNK, _LONG_LIFE = 128, 64, 768, 1024
"""Queries per chunk on a GPU; on a CPU; on a CPU with PyTorch's fused attention, if memories live for more than `_LONG_LIFE`
steps on average. Long chunks make matrix products more efficient; short ones list fewer memories that most of their queries
cannot see. On a CPU several short chunks are computed in one call."""


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
    documents: tuple[Tensor, Tensor] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Normalised inputs: span, k_pos [B, P, S] with P = 1 or Hkv, q_pos [B, 1, T], documents [B, T] and [B, S]; see
    `expire_attention`."""
    no_keys = q.new_zeros(0, q.shape[-1]) if relative_keys is None else relative_keys
    no_sinks = q.new_zeros(0) if sinks is None else sinks
    fuses = relative_keys is None and normalizer_eps == 0 and softcap == 0 and sinks is None
    chunk = chunk or choose_chunk(q, span, ramp, fuses=fuses)
    options = (ramp, causal, include_self, scale, normalizer_eps, softcap, chunk)
    return _forward_op(q, k, v, span, q_pos, k_pos, *(documents or (None, None)), no_keys, no_sinks, *options)[0]


def choose_chunk(q: Tensor, span: Tensor, ramp: float, *, fuses: bool) -> int:
    """Queries per chunk. Long chunks need the CPU's fused kernel (fuses), which does not store their scores."""
    if q.device.type != "cpu" or not span.numel() or torch.compiler.is_compiling():
        return _CHUNK
    life = rule.lifetime(span, ramp).clamp_max(q.shape[2]).double().mean()
    if life > _LONG_LIFE:
        return _LONG_CHUNK if fuses else _CHUNK
    return _SHORT_CHUNK


@dataclass
class _Chunk:
    """One chunk's gathered inputs and attention weights."""

    q: Tensor  # [N*R, K, G*C, D], scaled
    k: Tensor  # [N, K, n, D]
    v: Tensor
    weight: Tensor  # [N, K, G, C, n]
    mask: Tensor  # [N, 1, 1, C, n - full]
    softmax: Tensor | None  # unmasked weights, where eps > 0
    total: Tensor | None
    age: Tensor | None  # [N, 1, 1, C, n], where positions are relative
    slope: Tensor | None = None  # [N, K, G, C, n], derivative of the soft cap, where there is one
    of_sink: Tensor | None = None  # [N, K, G, C, 1], weight of the sink, where there is one
    log_total: Tensor | None = None  # [N, K, G, C], logarithm of the normaliser, where it was asked for


def attend_chunk(p: Problem, live: LiveList, *, logs: Tensor | None = None, keep_log: bool = False) -> _Chunk:
    """Attention weights of one chunk over its live list.

    logs [N, K, G, T]: logarithms of the normalisers, where queries see other memories beside those of `p`; keep_log: compute
    that of these memories alone. Both need an eps of 0.
    """
    group = p.q.shape[2]
    q = live.queries(p.q) * p.scale
    k, v = (live.take_states(x) for x in (p.k, p.v))  # [N, K, n, D]
    mask, age = mask_of_chunk(p, live)
    if not p.finite:
        k, v = without_unseen(k, v, F.pad(mask[:, 0], (live.full, 0), value=1.0))
    scores = (q @ k.mT).unflatten(2, (group, live.size))  # [N, K, G, C, n]
    if p.relative_keys.shape[0]:
        scores += _relative_scores(p, q, age, group)
    slope = None
    if p.softcap:
        squashed = torch.tanh_(scores.div_(p.softcap))
        slope, scores = 1 - squashed.square(), squashed * p.softcap
    if p.eps == 0:
        scores[..., live.full :] += fused.log_of_mask(mask)
        sinks = p.sinks.repeat_interleave(len(scores) // len(p.sinks), 0) if p.sinks.numel() else None
        if logs is not None:
            total = live.queries(logs).unflatten(2, (group, -1)).unsqueeze(-1)
            of_sink = None if sinks is None else torch.exp(sinks - total)
            return _Chunk(q, k, v, scores.sub_(total).exp_(), mask, None, None, age, slope, of_sink)
        log_total = _log_of_total(scores, sinks) if keep_log else None
        weight, of_sink = (_softmax(scores, live, mask), None) if sinks is None else softmax_with_sinks(scores, sinks)
        return _Chunk(q, k, v, weight, mask, None, None, age, slope, of_sink, log_total)
    scores[..., live.full :].masked_fill_(mask == 0, -torch.inf)
    softmax = _softmax(scores, live, mask)
    weight = softmax.clone()
    weight[..., live.full :] *= mask
    total = weight.sum(-1, keepdim=True) + p.eps
    return _Chunk(q, k, v, weight / total, mask, softmax, total, age, slope)


def _log_of_total(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The logarithm of the normaliser of each query, [N, K, G, C]; minus infinity where nothing lives."""
    if not scores.shape[-1]:
        log = scores.new_full(scores.shape[:-1], -torch.inf)
    else:
        log = torch.logsumexp(scores, -1)
    return log if sinks is None else torch.logaddexp(log, sinks.squeeze(-1).expand_as(log))


def mask_of_chunk(p: Problem, live: LiveList) -> tuple[Tensor, Tensor | None]:
    """The mask [N, 1, 1, C, n - full] of the entries that need one, and, with relative keys, the ages of all entries."""
    k_pos, span = live.take(p.k_pos), live.take(p.span)
    q_pos = live.of_queries(p.q_pos).unsqueeze(2)
    first = 0 if p.relative_keys.shape[0] else live.full
    age = q_pos - k_pos[:, None, first:]
    age = age if p.causal else age.abs()
    part = age[..., live.full - first :]
    visible = part >= 0 if p.include_self else part > 0
    if live.valid is not None:
        visible = visible & live.valid[:, None, live.full :]
    span, steps = span[:, None, live.full :], part.to(span.dtype)
    if p.q_doc is not None and p.k_doc is not None:
        visible = visible & (live.of_queries(p.q_doc).unsqueeze(2) == live.take(p.k_doc)[:, None, live.full :])
    mask = rule.fade(span - steps, p.ramp).masked_fill_(~visible, 0).to(p.q.dtype)
    every = age[:, None, None] if p.relative_keys.shape[0] else None
    return mask[:, None, None], every


def _softmax(scores: Tensor, live: LiveList, mask: Tensor) -> Tensor:
    """Softmax over the last dimension; zero for a query that sees no living memory."""
    weight = torch.softmax(scores, -1)
    if live.full == 0:
        weight.masked_fill_(mask.sum(-1, keepdim=True) == 0, 0)
    return weight


def _relative_index(p: Problem, age: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    window = p.relative_keys.shape[0]
    inside = (age >= 1) & (age <= window)
    return age.clamp(1, window).sub(1).expand(shape), inside


def _relative_scores(p: Problem, q: Tensor, age: Tensor | None, group: int) -> Tensor:
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
    q_doc: Tensor | None,
    k_doc: Tensor | None,
    relative_keys: Tensor,
    sinks: Tensor,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    eps: float,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithm of each query's normaliser [B, Hq, T] (zeros where the backward pass does not use it)."""
    options = (ramp, causal, include_self, scale, eps, softcap, chunk)
    p = lay_out(q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, sinks, *options)
    y = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    logs = torch.zeros(q.shape[:3], dtype=p.q.dtype, device=q.device)
    rows, log_rows = (rows_of_queries(x, k.shape[1], span.shape[1]) for x in (y, logs))
    if p.fuses and p.never_expires:
        part = fused.forward_whole(p.q, p.k, p.v, p.scale)
        rows.copy_(part.y)
        log_rows.copy_(part.log_total)
        return y, logs
    for live in p.lists():
        if p.fuses_chunks:
            mask, _ = mask_of_chunk(p, live)
            part = fused.forward(*chunk_inputs(p, live), fused.log_mask(mask, live, p.q.shape[2]), p.scale)
            live.put(log_rows, part.log_total)
            live.put(rows, part.y)
        else:
            c = attend_chunk(p, live)
            live.put(rows, c.weight.flatten(2, 3) @ c.v)
    return y, logs


def chunk_inputs(p: Problem, live: LiveList) -> tuple[Tensor, Tensor, Tensor]:
    """q [N, K, G*C, D], k and v [N, K, n, D] of a chunk."""
    return live.queries(p.q), live.take_states(p.k), live.take_states(p.v)


@_forward_op.register_fake
def _(q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, sinks, *options):
    work = torch.promote_types(q.dtype, torch.float32)
    return (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=work, device=q.device),
    )


@torch.library.custom_op("expire_span::chunked_backward", mutates_args=())
def _backward_op(
    dy: Tensor,
    y: Tensor,
    logs: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    q_doc: Tensor | None,
    k_doc: Tensor | None,
    relative_keys: Tensor,
    sinks: Tensor,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float,
    eps: float,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = (ramp, causal, include_self, scale, eps, softcap, chunk)
    p = lay_out(q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, sinks, *options)
    kv_heads, parts = k.shape[1], span.shape[1]
    # dy may be an expanded scalar with stride 0 (the gradient of a sum); batched matrix products are slow on such a tensor.
    dys, ys, logs = (rows_of_queries(x.to(p.q.dtype).contiguous(), kv_heads, parts) for x in (dy, y, logs))
    if p.fuses and p.never_expires:
        whole = fused.backward_whole(dys, p.q, p.k, p.v, fused.Forward(ys, logs), p.scale)
        none = torch.zeros_like(p.span), torch.zeros_like(p.relative_keys), torch.zeros_like(p.sinks)
        return as_given(q, k, v, span, relative_keys, sinks, *whole, *none)
    dq = torch.zeros_like(p.q)
    dk, dv = torch.zeros_like(p.k), torch.zeros_like(p.v)
    dspan = torch.zeros_like(p.span, memory_format=torch.contiguous_format)  # spans may come transposed
    drel, dsinks = torch.zeros_like(p.relative_keys), torch.zeros_like(p.sinks, memory_format=torch.contiguous_format)
    for live in p.lists():
        if p.fuses_chunks:
            fused_backward(p, live, dys, ys, logs, (dq, dk, dv, dspan))
        else:
            chunk_backward(p, live, dys, ys, (dq, dk, dv, dspan, drel, dsinks))
    return as_given(q, k, v, span, relative_keys, sinks, dq, dk, dv, dspan, drel, dsinks)


def as_given(
    q, k, v, span, relative_keys, sinks, dq, dk, dv, dspan, drel, dsinks
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the shapes and dtypes of the operator's inputs."""
    dq = dq.unflatten(0, (q.shape[0], -1)).flatten(1, 3)
    dk, dv = (memories_of_rows(x, q.shape[0]) for x in (dk, dv))
    dspan = dspan.unflatten(0, (q.shape[0], -1))
    dsinks = dsinks.view(q.shape[0], -1).sum(0) if sinks.numel() else dsinks
    found = (dq, dk, dv, dspan, drel, dsinks)
    dq, dk, dv, dspan, drel, dsinks = (x.to(y.dtype) for x, y in zip(found, (q, k, v, span, relative_keys, sinks)))
    return dq, dk, dv, dspan, drel, dsinks


def fused_backward(
    p: Problem, live: LiveList, dys: Tensor, ys: Tensor, logs: Tensor, grads: tuple[Tensor, ...]
) -> None:
    dq, dk, dv, dspan = grads
    mask, _ = mask_of_chunk(p, live)
    q, k, v = chunk_inputs(p, live)
    done = fused.Forward(live.queries(ys), live.queries(logs))
    log_mask = fused.log_mask(mask, live, p.q.shape[2])
    dy = live.queries(dys)
    into_q, into_k, into_v = fused.backward(dy, q, k, v, done, log_mask, p.scale)
    live.put(dq, into_q)
    live.add_states(dk, into_k)
    live.add_states(dv, into_v)
    fade = fused.ramp_gradient(dy, q, k[:, :, live.full :], v[:, :, live.full :], done, mask, p.scale)
    if fade is not None:
        live.add(dspan, F.pad(fade / p.ramp, (live.full, 0)).to(dspan.dtype))


def chunk_backward(
    p: Problem, live: LiveList, dys: Tensor, ys: Tensor, grads: tuple[Tensor, ...], logs: Tensor | None = None
) -> None:
    dq, dk, dv, dspan, drel, dsinks = grads
    group = p.q.shape[2]
    c = attend_chunk(p, live, logs=logs)
    dy, y = live.queries(dys), live.queries(ys)  # [N*R, K, G*C, D]
    delta = (dy * y).sum(-1, keepdim=True).unflatten(2, (group, -1))
    live.add_states(dv, c.weight.flatten(2, 3).mT @ dy)
    ds = (dy @ c.v.mT).unflatten(2, (group, -1)).sub_(delta)
    if c.of_sink is not None:
        into = (c.of_sink * delta).sum(3, keepdim=True)
        dsinks -= into.unflatten(0, (len(dsinks), -1)).sum(1)
    dmask = _score_gradient(p, live, c, ds)  # [N, C, n - full]
    if c.slope is not None:
        ds.mul_(c.slope)
    fade = rule.slope(dmask, c.mask[:, 0, 0]).sum(1) / p.ramp
    live.add(dspan, F.pad(fade, (live.full, 0)).to(dspan.dtype))
    flat = ds.flatten(2, 3)
    live.add_states(dk, flat.mT @ c.q)
    into_q = flat @ c.k
    if p.relative_keys.shape[0]:
        into_q += _relative_backward(p, c, ds, drel)
    live.put(dq, into_q * p.scale)


def _score_gradient(p: Problem, live: LiveList, c: _Chunk, ds: Tensor) -> Tensor:
    """Gradients of the scores and the mask. On entry ds holds dw - dy . y; it is overwritten by the gradient of the scores.

    Returns the gradient of the mask, summed over heads, [N, C, n - full].
    """
    if c.softmax is None:
        ds.mul_(c.weight)
        return ds[..., live.full :].sum((1, 2)) / torch.where(c.mask > 0, c.mask, 1)[:, 0, 0]
    assert c.total is not None
    ds.div_(c.total)
    dmask = (ds[..., live.full :] * c.softmax[..., live.full :]).sum((1, 2))
    ds[..., live.full :] *= c.mask
    ds.sub_((ds * c.softmax).sum(-1, keepdim=True)).mul_(c.softmax)
    return dmask


def _relative_backward(p: Problem, c: _Chunk, ds: Tensor, drel: Tensor) -> Tensor:
    assert c.age is not None
    index, inside = _relative_index(p, c.age, ds.shape)
    table = ds.new_zeros(*ds.shape[:-1], p.relative_keys.shape[0])
    table.scatter_add_(-1, index, ds.masked_fill(~inside, 0))
    table = table.flatten(2, 3)  # [N, K, G*C, M]
    drel += table.flatten(0, 2).T @ c.q.flatten(0, 2)
    return table @ p.relative_keys


@_backward_op.register_fake
def _(dy, y, logs, q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, sinks, *options):
    parts, (batch, kv_heads, memories, dim) = span.shape[1], k.shape
    rows = (batch * parts, kv_heads // parts, memories, dim)
    dk, dv = (memories_of_rows(torch.empty(rows, dtype=x.dtype, device=x.device), batch) for x in (k, v))
    given = (q, span, relative_keys, sinks)
    dq, dspan, drel, dsinks = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given)
    return dq, dk, dv, dspan, drel, dsinks


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.ramp, ctx.causal, ctx.include_self, ctx.scale, ctx.eps, ctx.softcap, ctx.chunk = inputs
    ctx.save_for_backward(*output, *tensors)


def _backward(ctx, dy, _):
    options = (ctx.ramp, ctx.causal, ctx.include_self, ctx.scale, ctx.eps, ctx.softcap, ctx.chunk)
    dq, dk, dv, dspan, drel, dsinks = _backward_op(dy, *ctx.saved_tensors, *options)
    return dq, dk, dv, dspan, None, None, None, None, drel, dsinks, *(None for _ in options)


def _refuse_second(ctx, *_):
    raise ValueError("the chunked operator has first derivatives only; give impl='reference' for second ones")


_forward_op.register_autograd(_backward, setup_context=_save)
_backward_op.register_autograd(_refuse_second)
