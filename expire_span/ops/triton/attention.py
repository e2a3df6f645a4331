"""The fused operator for training and inference: two PyTorch ops with known shapes and a gradient, so that torch.compile keeps one
graph around them."""

# No `from __future__ import annotations` here: torch.library reads the signatures' real types.
from collections.abc import Callable
from typing import Optional

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from expire_span.ops.call import Call

from .backward import Backward
from .forward import LOG2E, empty_rows, relative_table, run_forward
from .layout import Plan, num_heads, num_slots, num_words
from .lists import build_plan
from .tuning import choose, dot_precision

MaybeTensor = Optional[Tensor]  # noqa: UP045
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_PLAIN = {Tensor, torch.nn.Parameter}


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    include_self: bool = True,
    scale: float,
    relative_keys: MaybeTensor = None,
    normalizer_eps: float = 0.0,
    softcap: float = 0.0,
    sinks: MaybeTensor = None,
    documents: tuple[Tensor, Tensor] | None = None,
    deterministic: bool = False,
) -> Tensor:
    """Expiring attention y [B, Hq, T, D] with gradients to q, k, v, span, relative_keys and sinks.

    documents: document ids of queries [B, T] and memories [B, S], never decreasing along a row. deterministic: gradients that
    are bitwise equal from run to run.

    relative_keys [M, D]: their scores are computed before the kernels, as a table [B, T, Hq, M] that the kernels index by age.
    The table's gradient has one entry for each query and age. Two memories at one position that are alive at the same time
    would both write that entry, and the gradient of one of them would be lost.
    """
    if q.shape[2] == 0 or k.shape[2] == 0:
        return torch.zeros_like(q)
    return _apply(
        *_prepare(
            q, k, v, span, q_pos, k_pos, ramp, include_self, scale, relative_keys, normalizer_eps, softcap, sinks,
            documents, deterministic,
        )
    )  # fmt: skip


def attend_with_normalizer(call: Call) -> tuple[Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], tuple]]:
    """y, lse (see forward.py), and a function of (dy, y, lse) that gives the gradients of q, k, v, span, relative keys and
    sinks, where y and lse are those of these memories or of more. Nothing is recorded for autograd."""
    given = (call.q, call.k, call.v, call.span, call.q_pos, call.k_pos, call.ramp, call.include_self, call.scale)
    more = (call.relative_keys, call.normalizer_eps, call.softcap, call.sinks, call.ids, call.deterministic)
    inputs = _prepare(*given, *more)
    y, lse, *plan = _attention(*inputs)
    q, span, relative_keys, sinks = inputs[0], inputs[3], inputs[8], inputs[9]
    _, include_self, scale, eps, softcap, deterministic = inputs[10:]
    options = (call.k.shape[2], include_self, call.ramp, scale, eps, softcap, call.ids is not None, deterministic)

    def run(dy: Tensor, y: Tensor, lse: Tensor) -> tuple:
        rows = empty_rows(*y.shape, dtype=q.dtype, device=q.device).copy_(y)
        grads = _attention_backward(dy, q, relative_keys, sinks, rows, lse.contiguous(), *plan, *options)
        dq, dk, dv, dspan, *rest = grads
        sign = 1.0 if call.scale > 0 else -1.0 if call.scale < 0 else 0.0  # see _positive_scale
        return dq * sign, dk, dv, _sum_shared(dspan, span.shape), *rest

    return y, lse, run


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, ramp: float, include_self: bool, scale: float,
    relative_keys: MaybeTensor, normalizer_eps: float, softcap: float, sinks: MaybeTensor,
    documents: tuple[Tensor, Tensor] | None, deterministic: bool,
) -> tuple:  # fmt: skip
    """The arguments of the op."""
    q, scale = _positive_scale(q, scale)
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    q_pos = q_pos if q_pos.stride(-1) == 1 else q_pos.contiguous()
    q_doc, k_doc = (x.contiguous() for x in documents) if documents is not None else (None, None)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    has_relative = relative_keys is not None and relative_keys.shape[0] > 0
    relative_keys = relative_keys.to(q.dtype) if has_relative else None
    options = (ramp, include_self, scale, normalizer_eps, softcap, deterministic)
    sinks = None if sinks is None else sinks.float()
    return q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, sinks, *options


def _positive_scale(q: Tensor, scale: float) -> tuple[Tensor, float]:
    """Return q and a positive scale with the same product. The kernels take the maximum of scores before they scale them."""
    if scale > 0:
        return q, scale
    return (-q, -scale) if scale < 0 else (q * 0, 1.0)


def readable(x: Tensor) -> Tensor:
    """x itself if the kernels can read it (contiguous rows, strides aligned to 16 bytes), else a contiguous copy."""
    step = 16 // x.element_size()
    strided = x.stride(-1) == 1 and all(s > 0 and s % step == 0 for s in x.stride()[:-1])
    return x if strided and x.data_ptr() % 16 == 0 else x.contiguous()


def _define(name: str, run: Callable) -> Callable:
    """A PyTorch op from a function. `torch.library.custom_op` does the same, but its wrapper takes longer than a kernel launch."""
    torch.library.define(f"expire_span::{name}", torch.library.infer_schema(run, mutates_args=()))
    for device in ("cpu", "cuda"):
        torch.library.impl(f"expire_span::{name}", device, run)
    return getattr(torch.ops.expire_span, name).default


def _attention(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, q_doc: MaybeTensor,
    k_doc: MaybeTensor, relative_keys: MaybeTensor, sinks: MaybeTensor, ramp: float, include_self: bool, scale: float,
    eps: float, softcap: float, deterministic: bool,
) -> Outputs:  # fmt: skip
    """y, lse, and the tensors of the plan (words, sorted k and v), which the backward pass uses again."""
    tuning = choose(q.shape[-1], q.dtype, relative_keys is not None)
    q = readable(q)
    table = relative_table(q, relative_keys)
    plan = build_plan(
        k, v, span, q_pos, k_pos, q_doc, k_doc, ramp=ramp, include_self=include_self,
        block_m=tuning.forward.block_m, block_n=tuning.block_n, window=0 if table is None else table.shape[-1],
    )  # fmt: skip
    y, lse = run_forward(
        q, plan, table, ramp=ramp, scale=scale, eps=eps, softcap=softcap, sinks=None if sinks is None else sinks * LOG2E,
        has_docs=q_doc is not None, tuning=tuning, precision=dot_precision(q.dtype),
    )  # fmt: skip
    return y, lse, plan.words, plan.k, plan.v


def _fake_attention(q, k, v, span, q_pos, k_pos, q_doc, k_doc, relative_keys, *_):
    tuning = choose(q.shape[-1], q.dtype, relative_keys is not None)
    (batch, kv_heads, memories, dim), queries, heads = k.shape, q.shape[2], num_heads(span, k_pos)
    slots = num_slots(memories, int(queries), tuning.block_n)
    words = num_words(slots, queries, tuning.forward.block_m, tuning.block_n)
    return (
        empty_rows(*q.shape, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        torch.empty((batch * heads, words), dtype=torch.int32, device=q.device),
        k.new_empty(batch, kv_heads, slots, dim),
        v.new_empty(batch, kv_heads, slots, dim),
    )


def _attention_backward(
    dy: Tensor, q: Tensor, relative_keys: MaybeTensor, sinks: MaybeTensor, y: Tensor, lse: Tensor, words: Tensor, k: Tensor,
    v: Tensor, memories: int, include_self: bool, ramp: float, scale: float, eps: float, softcap: float, has_docs: bool,
    deterministic: bool,
) -> Gradients:  # fmt: skip
    """dq, dk, dv, dspan [B, Hkv, S] and the gradients of the relative keys and of sinks (empty if there are none).

    The table of the relative keys' scores is recomputed: stored by the forward pass, it would be the largest tensor of all.
    """
    q = readable(q)
    table = relative_table(q, relative_keys)
    work = Backward(
        readable(dy), q, y, lse, Plan(words, k, v, 0 if include_self else 1), memories, ramp, scale, has_docs,
        choose(q.shape[-1], q.dtype, table is not None), dot_precision(q.dtype), table, eps, softcap,
    )  # fmt: skip
    dq, dk, dv, dspan, dtable, delta = work.run(deterministic)
    dsinks = lse.new_empty(0) if sinks is None else _sinks_gradient(sinks, lse, delta)
    if relative_keys is None:
        return dq, dk, dv, dspan, dtable, dsinks
    return _add_relative(dq, q, dtable, relative_keys), dk, dv, dspan, _relative_gradient(q, dtable), dsinks


def _add_relative(dq: Tensor, q: Tensor, dtable: Tensor, relative_keys: Tensor) -> Tensor:
    """dq plus the gradient that q gets through the table of the relative keys' scores."""
    (batch, heads, count, dim), rows = q.shape, dtable.flatten(0, 2)
    return (
        torch.addmm(dq.transpose(1, 2).reshape(-1, dim), rows, relative_keys)
        .view(batch, count, heads, dim)
        .transpose(1, 2)
    )


def _sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """[Hq]: that of a score whose value is zero."""
    return -(torch.exp2(sinks.view(1, -1, 1) * LOG2E - lse) * delta).sum((0, 2))


def _relative_gradient(q: Tensor, dtable: Tensor) -> Tensor:
    return dtable.flatten(0, 2).T @ q.transpose(1, 2).reshape(-1, q.shape[3])


def _fake_backward(dy, q, relative_keys, sinks, y, lse, words, k, v, memories, *options):
    shape = (k.shape[0], k.shape[1], memories)
    like = dict(dtype=q.dtype, device=q.device)
    dk, dv = (empty_rows(*shape, k.shape[3], **like) for _ in range(2))
    dspan = torch.empty(shape, dtype=torch.float32, device=q.device)
    return (
        empty_rows(*q.shape, **like),
        dk,
        dv,
        dspan,
        torch.empty(0 if relative_keys is None else relative_keys.shape, **like),
        torch.empty(0 if sinks is None else sinks.shape, dtype=torch.float32, device=q.device),
    )


def _save(ctx, inputs, output) -> None:
    q, k, _, span, _, _, q_doc, _, relative_keys, sinks, ramp, include_self, scale, eps, softcap, deterministic = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, relative_keys, sinks, *output)
    ctx.options = (k.shape[2], include_self, ramp, scale, eps, softcap, q_doc is not None, deterministic)
    ctx.span_shape, ctx.span_dtype = span.shape, span.dtype
    ctx.has_relative, ctx.has_sinks = relative_keys is not None, sinks is not None


def _differentiate(ctx, dy, *_, run: Callable | None = None):
    if dy is None:
        return (None,) * 16
    dq, dk, dv, dspan, drelative, dsinks = (run or attention_backward)(dy, *ctx.saved_tensors, *ctx.options)
    dspan = _sum_shared(dspan, ctx.span_shape).to(ctx.span_dtype)
    learned = (drelative if ctx.has_relative else None, dsinks if ctx.has_sinks else None)
    return dq, dk, dv, dspan, *(None,) * 4, *learned, *(None,) * 6


def _sum_shared(dspan: Tensor, shape: torch.Size) -> Tensor:
    """Reduce the gradient per head [B, Hkv, S] to the shape of the spans, by summing over heads that share a row of spans."""
    own = shape[1] - 1 if len(shape) == 3 else 0
    if own == dspan.shape[1] - 1:
        return dspan.view(shape)
    shared = dspan[:, own:].sum(1, keepdim=True)
    return (torch.cat([dspan[:, :own], shared], 1) if own else shared).view(shape)


attention = _define("attention", _attention)
attention_backward = _define("attention_backward", _attention_backward)
torch.library.register_fake("expire_span::attention", _fake_attention)
torch.library.register_fake("expire_span::attention_backward", _fake_backward)
torch.library.register_autograd("expire_span::attention", _differentiate, setup_context=_save)


class EagerAttention(torch.autograd.Function):
    """The same function and gradient without PyTorch's dispatcher, which takes more host time than the kernel launches."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _attention(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return _differentiate(ctx, *grads, run=_attention_backward)


def _apply(*inputs) -> Tensor:
    """y. Calls the registered op where torch.compile, a dispatch mode or a tensor subclass needs it, else `EagerAttention`, which costs
    less host time."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or not _PLAIN.issuperset(map(type, inputs[:4])):
        return attention(*inputs)[0]
    return EagerAttention.apply(*inputs)
