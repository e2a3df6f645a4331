"""Attention over memories that are read in parts, one part after another, and joined by the normalisers.

Where a query sees two sets of memories, with outputs y1 and y2 and normalisers Z1 and Z2, it reads

    y = (Z1 y1 + Z2 y2) / (Z1 + Z2)

exactly. In the backward pass each part recomputes its weights from Z1 + Z2 and the joined y; its gradients are then those of
the whole. So a part can be attended to, and differentiated, while the others are still on their way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .call import Call, spans_of_heads

Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Of q, k, v, span, the relative keys and the sinks."""


@dataclass(frozen=True)
class Part:
    """The attention of a call's queries over its own memories alone."""

    y: Tensor  # [B, Hq, T, D]
    log: Tensor  # [B, Hq, T], natural logarithm of the normaliser, minus infinity where nothing lives
    backward: Callable[[Tensor, Tensor, Tensor], Gradients]
    """Gradients, given those of the joined output, that output, and the logarithm of the joined normaliser."""


def can_read_parts(call: Call) -> bool:
    """Whether this call's implementation returns normalisers. The dense definition does not, nor does the plain one with an
    epsilon, whose normaliser holds two sums."""
    return call.impl == "triton" or (call.impl == "chunked" and call.normalizer_eps == 0)


def attend_to_part(call: Call) -> Part:
    return _triton_part(call) if call.impl == "triton" else _chunked_part(call)


def join_parts(parts: list[Part]) -> tuple[Tensor, Tensor]:
    """The output over the memories of all parts, and the logarithm of its normaliser, zero where nothing lives."""
    log = torch.stack([part.log for part in parts]).logsumexp(0)
    log = log.masked_fill(log == -torch.inf, 0)
    y = sum((part.log - log).exp().unsqueeze(-1) * part.y for part in parts)
    assert isinstance(y, Tensor)
    return y, log


def _chunked_part(call: Call) -> Part:
    from .chunked import as_given, choose_chunk, chunk_backward, fused_backward
    from .problem import lay_out, rows_of_queries

    given, (span, q_pos, k_pos) = _with_own_span(call)
    relative = call.q.new_zeros(0, call.q.shape[-1]) if call.relative_keys is None else call.relative_keys.detach()
    sinks = call.q.new_zeros(0) if call.sinks is None else call.sinks.detach()
    q, k, v, lives = (x.detach() for x in (call.q, call.k, call.v, span))
    fuses = call.relative_keys is None and call.softcap == 0 and call.sinks is None
    chunk = choose_chunk(q, lives, call.ramp, fuses=fuses)
    q_doc, k_doc = call.ids or (None, None)
    options = (call.ramp, call.causal, call.include_self, call.scale, 0.0, call.softcap, chunk)
    inputs = (q, k, v, lives, q_pos, k_pos, q_doc, k_doc, relative, sinks, *options)
    p = lay_out(*inputs)
    y, log = (torch.zeros(shape, dtype=p.q.dtype, device=p.q.device) for shape in (call.q.shape, call.q.shape[:3]))
    rows = tuple(rows_of_queries(x, call.k.shape[1], span.shape[1]) for x in (y, log))
    _attend_in_chunks(p, *rows)

    def backward(dy: Tensor, y: Tensor, log: Tensor) -> Gradients:
        p = lay_out(*inputs)  # its copies are not held in between
        of_rows = (x.to(p.q.dtype).contiguous() for x in (dy, y, log))
        dys, ys, logs = (rows_of_queries(x, call.k.shape[1], span.shape[1]) for x in of_rows)
        like = (p.q, p.k, p.v, p.span, p.relative_keys, p.sinks)
        grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in like)
        for live in p.lists():
            if p.fuses_chunks:
                fused_backward(p, live, dys, ys, logs, grads[:4])
            else:
                chunk_backward(p, live, dys, ys, grads, logs)
        dq, dk, dv, dspan, drelative, _ = as_given(q, k, v, lives, relative, sinks, *grads)
        dsinks = None if call.sinks is None else _gradient_of_sinks(call.sinks, dy, y, log)
        return dq, dk, dv, _gradient_of_span(given, span, dspan), drelative, dsinks

    return Part(y, log, backward)


def _gradient_of_sinks(sinks: Tensor, dy: Tensor, y: Tensor, log: Tensor) -> Tensor:
    """[Hq]: that of a score whose value is zero, from all queries, those that see none of a part's memories as well."""
    weight = torch.exp(sinks.detach().to(log.dtype).view(1, -1, 1) - log)
    return -(weight * (dy * y).to(log.dtype).sum(-1)).sum((0, 2)).to(sinks.dtype)


def _attend_in_chunks(p: Any, y: Tensor, log: Tensor) -> None:
    """Write the outputs [N, K, G, T, D] and logarithms of normalisers [N, K, G, T] of a laid out problem."""
    from . import fused
    from .chunked import attend_chunk, chunk_inputs, mask_of_chunk

    log.copy_(p.sinks.squeeze(-1).expand_as(log) if p.sinks.numel() else log.new_full((), -torch.inf).expand_as(log))
    for live in p.lists():  # none for queries that see nothing
        if p.fuses_chunks:
            mask, _ = mask_of_chunk(p, live)
            done = fused.forward(*chunk_inputs(p, live), fused.log_mask(mask, live, p.q.shape[2]), p.scale)
            live.put(y, done.y)
            of_chunk = done.log_total.unflatten(2, (p.q.shape[2], -1))
            if live.full == 0:  # the kernel's logarithm of a query that sees nothing is no number to rely on
                of_chunk = of_chunk.masked_fill((mask == 0).all(-1), -torch.inf)
            live.put(log, of_chunk.flatten(2))
        else:
            c = attend_chunk(p, live, keep_log=True)
            assert c.log_total is not None
            live.put(y, c.weight.flatten(2, 3) @ c.v)
            live.put(log, c.log_total.flatten(2))


def _triton_part(call: Call) -> Part:
    """The kernels count in powers of two, and say plus infinity where nothing lives."""
    from .triton.attention import attend_with_normalizer

    given = call.span.detach().requires_grad_()
    with torch.enable_grad():
        span = spans_of_heads(given, call.k.shape[1]) if call.k_pos.dim() == 3 else given
    detached = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach(), span=span.detach())
    y, log2, run = attend_with_normalizer(detached)
    log = (log2 * math.log(2)).masked_fill(log2 == torch.inf, -torch.inf)

    def backward(dy: Tensor, y: Tensor, log: Tensor) -> Gradients:
        dq, dk, dv, dspan, drelative, dsinks = run(dy.to(call.q.dtype), y.to(call.q.dtype), log / math.log(2))
        return dq, dk, dv, _gradient_of_span(given, span, dspan), drelative, dsinks

    return Part(y.float(), log, backward)


def _with_own_span(call: Call) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A leaf in place of the call's spans, and `lifetimes_by_head` computed from it."""
    given = call.span.detach().requires_grad_()
    with torch.enable_grad():
        return given, replace(call, span=given).lifetimes_by_head()


def _gradient_of_span(given: Tensor, span: Tensor, dspan: Tensor) -> Tensor:
    """The gradient of the spans as they were given, from that of the rows that were made of them."""
    if span is given:
        return dspan
    with torch.enable_grad():
        return torch.autograd.grad(span, given, dspan.to(span.dtype))[0]
