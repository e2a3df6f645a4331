"""The exchange of memories behind the attention to a rank's own: they travel while it is computed, and so do their gradients.

The operator reads its memories in two parts (ops/parts.py): those of this rank, and those that came from others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from expire_span.ops.call import Call
from expire_span.ops.parts import attend_to_part, join_parts

from .exchange import Exchange
from .survivors import Memories, Picked, lay_out_picked


def attend_meanwhile(exchange: Exchange, own: Memories, call: Call) -> Tensor:
    """The output over this rank's memories and those that come."""
    tensors = (call.q, call.k, call.v, call.span, call.relative_keys, call.sinks)
    picked = exchange.picked
    found: Any = _AttendMeanwhile.apply(exchange, own, call, *tensors, picked.states, picked.span)
    return found


class _Came:
    """The memories that came, laid out as a call's, with the way back from their gradients there to those that travel."""

    def __init__(self, picked: Picked, own: Memories, call: Call) -> None:
        self.leaves = (picked.states.requires_grad_(), picked.span.requires_grad_())
        with torch.enable_grad():
            self.call = lay_out_picked(picked, own).into(call)
        self.part = None
        if len(picked):
            made = {name: getattr(self.call, name).detach() for name in ("k", "v", "span")}
            self.part = attend_to_part(replace(self.call, **made, sinks=None))  # a sink counts once

    def backward(self, dy: Tensor, y: Tensor, log: Tensor) -> tuple[Tensor | None, Tensor | None, list[Tensor]]:
        """Gradients of the queries and of the relative keys, and those of the leaves."""
        if self.part is None:
            return None, None, [torch.zeros_like(x) for x in self.leaves]
        dq, dk, dv, dspan, drelative, _ = self.part.backward(dy, y, log)
        made, given = (self.call.k, self.call.v, self.call.span), (dk, dv, dspan)
        with torch.enable_grad():
            found = torch.autograd.grad(made, self.leaves, [x.to(m.dtype) for x, m in zip(given, made)])
        return dq, drelative, list(found)


class _AttendMeanwhile(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        exchange: Exchange,
        own: Memories,
        call: Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        span: Tensor,
        relative_keys: Tensor | None,
        sinks: Tensor | None,
        states: Tensor,
        picked_span: Tensor,
    ) -> Tensor:
        call = replace(call, q=q, k=k, v=v, span=span, relative_keys=relative_keys, sinks=sinks)
        transfer = exchange.begin(states, picked_span, exchange.picked.places)
        here = attend_to_part(call)
        states, picked_span, places = transfer.wait()
        came = _Came(Picked(states, picked_span, places, exchange.row), own, call)
        y, log = join_parts([here] if came.part is None else [here, came.part])
        y = y.to(q.dtype)
        if any(ctx.needs_input_grad):
            ctx.exchange, ctx.here, ctx.came = exchange, here, came
            ctx.travels = any(ctx.needs_input_grad[-2:])
            ctx.save_for_backward(y, log)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        y, log = ctx.saved_tensors
        dq, drelative, of_came = ctx.came.backward(dy, y, log)
        transfer = ctx.exchange.begin_back(*of_came) if ctx.travels else None
        into_q, dk, dv, dspan, into_relative, dsinks = ctx.here.backward(dy, y, log)
        back = (None, None) if transfer is None else transfer.wait()
        dq, drelative = (_sum(a, b) for a, b in ((into_q, dq), (into_relative, drelative)))
        grads = (dq, dk, dv, dspan, drelative, dsinks)
        needed = (x if need else None for x, need in zip(grads, ctx.needs_input_grad[3:]))
        return None, None, None, *needed, *back


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b
