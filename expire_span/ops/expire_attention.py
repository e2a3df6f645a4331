"""The public operator: check the inputs, choose an implementation, call it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from . import inputs
from .call import Call, spans_of_heads
from .choice import Impl, resolve_impl
from .context.current import Context, active_context, outside_graphs
from .documents import Boundaries, Documents, document_ids


def expire_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    *,
    ramp: float,
    causal: bool = True,
    include_self: bool = True,
    scale: float | None = None,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    documents: Documents | None = None,
    cu_seqlens: Boundaries | None = None,
    deterministic: bool = False,
    impl: Impl = "auto",
    check_values: bool | None = None,
) -> Tensor:
    """Attention over memories that expire: query t sees memory i with the mask `clamp(1 + (span_i - age) / ramp, 0, 1)`.

    Args:
        q: queries [B, Hq, T, D].
        k, v: memories [B, Hkv, S, D]; Hkv divides Hq. A memory that no query sees may hold any values, NaN included.
        span: for how many steps each memory has full weight, >= -ramp (below 0 it is born on its ramp): [B, S], or [B, P, S]
            with P in 1..Hkv: the first P - 1 key/value heads have spans of their own, and all others share the last row.
            Lifetimes are computed in float32 whatever the dtype of q; in float64 if both are float64.
        q_pos: integer positions [T] or [B, T], never decreasing along a row; without q_pos and k_pos, the memories are at
            0..S-1 and the queries at the last T of these positions.
        k_pos: integer positions [S], [B, S] or [B, Hkv, S], never decreasing along a row; gaps are allowed.
        ramp: length of the soft edge, in steps, > 0.
        causal: memories after the query are unseen; False gives encoders, where age is |t - i|.
        include_self: whether age 0 is seen.
        scale: of the scores; 1/sqrt(D) by default.
        relative_keys: [M, D], learned embedding of distances 1..M: adds q . relative_keys[age - 1] to the scores. With
            gradients in triton, memories that live at the same time must have different positions.
        normalizer_eps: added to the normaliser, in units of the living memories' sum of exp(score) (the released code: 1e-8).
        softcap: squashes scores to c tanh(score / c) before the softmax (Gemma 2); 0 leaves them as they are.
        sinks: [Hq], one more logit of each query head in its softmax, to which no value belongs (gpt-oss).
        documents: for packed documents, integer ids that never decrease along a row: of the tokens, [T] or [B, T] where S = T,
            or a pair (ids of the queries, ids of the memories). There is no attention between documents.
        cu_seqlens: the same as boundaries [0, n1, n1 + n2, ..., T], a tensor or a list, the same for all rows.
        deterministic: make gradients bitwise equal from run to run on a GPU, at some cost; also switched on by
            torch.use_deterministic_algorithms.
        impl: "reference" (dense definition), "chunked" (plain PyTorch over live lists), "triton" (GPU), or "auto".
            Second derivatives and transforms of torch.func (vmap, grad, jvp) need "reference".
        check_values: refuse NaN spans, spans below -ramp, decreasing positions and wrong boundaries; by default on the CPU
            only, since the check waits for the device.

    Returns y [B, Hq, T, D]; a query with no living memory gets zero. Gradients reach q, k, v, span, relative_keys and sinks.
    """
    given: dict[str, Any] = dict(
        ramp=ramp,
        causal=causal,
        include_self=include_self,
        scale=scale,
        relative_keys=relative_keys,
        normalizer_eps=normalizer_eps,
        softcap=softcap,
        sinks=sinks,
        documents=documents,
        cu_seqlens=cu_seqlens,
        deterministic=deterministic,
        impl=impl,
        check_values=check_values,
    )
    context = active_context()
    if context is not None:
        return outside_graphs(_attend_in_context, context, q, k, v, span, q_pos, k_pos, given)
    return _run(_check(None, q, k, v, span, q_pos, k_pos, **given))


def _attend_in_context(
    context: Context, q: Any, k: Any, v: Any, span: Any, q_pos: Any, k_pos: Any, given: Any
) -> Tensor:
    """The same for one part of a sequence, whose queries also see living memories of the other parts."""
    call = context.prepare(lambda: _check(context, q, k, v, span, q_pos, k_pos, **given))
    return _run(call) if call.q.numel() == 0 else context.attend(call, _run)


def _check(
    context: Context | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor | None,
    k_pos: Tensor | None,
    *,
    ramp: float,
    causal: bool,
    include_self: bool,
    scale: float | None,
    relative_keys: Tensor | None,
    normalizer_eps: float,
    softcap: float,
    sinks: Tensor | None,
    documents: Documents | None,
    cu_seqlens: Boundaries | None,
    deterministic: bool,
    impl: Impl,
    check_values: bool | None,
) -> Call:
    """Check the arguments and choose an implementation."""
    inputs.check_tensors(q=q, k=k, v=v, span=span)
    inputs.check_rank(q, k)
    first = 0 if context is None or q_pos is not None else context.first(q.shape[2])
    if context is not None and q_pos is None and k_pos is None and q.shape[2] != k.shape[2]:
        given = f"got {q.shape[2]} queries and {k.shape[2]} memories"
        raise ValueError(f"in a context, a part has as many memories as queries, {given}; give q_pos and k_pos")
    q_pos, k_pos = inputs.default_positions(q.shape[2], k.shape[2], q_pos, k_pos, q.device)
    inputs.check_tensors(q_pos=q_pos, k_pos=k_pos)
    inputs.check_relative_keys(relative_keys, q)
    inputs.check_shapes(q, k, v, span, q_pos, k_pos, relative_keys)
    inputs.check_dtypes(q, k, v, span, q_pos, k_pos)
    inputs.check_numbers(ramp, scale, normalizer_eps)
    inputs.check_softcap(softcap)
    inputs.check_sinks(sinks, q, normalizer_eps)
    inputs.check_switches(causal=causal, include_self=include_self, deterministic=deterministic)
    transform = inputs.transformed(q, k, v, span, relative_keys, sinks)
    check = check_values if check_values is not None else transform is None and _cheap_to_check(q)
    if check:
        inputs.check_values(span, q_pos, k_pos, ramp)
    whole = q.shape[2] if context is None else context.total(q.shape[2])
    part = (0 if context is None else context.first(q.shape[2]), whole)
    ids = document_ids(documents, cu_seqlens, q, k.shape[2], check, part)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    chosen = resolve_impl(
        impl,
        q.device,
        causal=causal,
        head_dim=q.shape[-1],
        dtype=q.dtype,
    )
    # The fast implementations define first derivatives only, none of torch.func's transforms.
    if transform is not None and (chosen != "reference" or context is not None):
        needs = "impl='reference'" if context is None else "the whole sequence in one call, without a context"
        raise ValueError(f"under {transform} the operator needs {needs}, got impl={impl!r}")
    span = span.to(inputs.lifetime_dtype(span, q))
    q_pos, k_pos = (x.long() if first == 0 else x.long() + first for x in (q_pos, k_pos))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    options = (float(ramp), include_self, scale, relative_keys, normalizer_eps, float(softcap), sinks)
    return Call(q, k, v, span, q_pos, k_pos, ids, *options, causal, deterministic, check, chosen)


def _run(call: Call) -> Tensor:
    if call.q.shape[0] == 0 or call.q.shape[2] == 0:
        return call.q.clone()  # no rows or no queries: y is empty like q
    if call.impl == "triton":
        return _run_triton(call)
    return _run_reference(call) if call.impl == "reference" else _run_chunked(call)


def _run_triton(call: Call) -> Tensor:
    """Call the GPU kernels. They take spans and positions in the shapes given, since every view costs host time."""
    from .triton import triton_attention, triton_decode

    decodes, span = call.decodes, call.span
    if call.k_pos.dim() == 3 or decodes:
        span = spans_of_heads(span, call.k.shape[1])
    tensors = (call.q, call.k, call.v, span, call.q_pos, call.k_pos)
    if decodes and call.ids is None:
        return triton_decode(*tensors, **call.options, **call.paper_options, **call.model_options)
    if call.check and call.relative_keys is not None and call.learns:
        inputs.check_distinct(call.q_pos, call.k_pos, call.relative_keys.shape[0], call.ids)
    options = call.options | call.paper_options | call.model_options
    return triton_attention(*tensors, **options, documents=call.ids, deterministic=call.deterministic)


def _run_chunked(call: Call) -> Tensor:
    tensors = (call.q, call.k, call.v, *call.lifetimes_by_head())
    if call.decodes and call.k.shape[2] and call.relative_keys is None and call.normalizer_eps == 0:
        from .decode import decode_attention

        return decode_attention(*tensors, causal=call.causal, documents=call.ids, **call.options, **call.model_options)
    from .chunked import chunked_attention

    options = call.options | call.paper_options | call.model_options
    return chunked_attention(*tensors, causal=call.causal, documents=call.ids, **options)


def _run_reference(call: Call) -> Tensor:
    from .reference import reference_attention

    tensors = (call.q, call.k, call.v, *(x.expand(-1, call.k.shape[1], -1) for x in call.lifetimes_by_head()))
    options = call.options | call.paper_options | call.model_options
    return reference_attention(*tensors, causal=call.causal, documents=call.ids, **options)


def attend_in_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    segments: tuple[Tensor, Tensor, int, int],
    *,
    ramp: float,
    include_self: bool = True,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
) -> Tensor:
    """The operator for a few queries over a store in the segment layout (rows one after another in flat buffers); no gradients.

    q [B, Hq, T, D], q_pos [T]; k, v [slots, D] if each key/value head is a row of the store, [slots, Hkv, D] if each batch row
    is; span and k_pos [slots]. segments: see `triton_decode`. `can_attend_in_segments` says whether a call is supported.
    """
    from .triton import triton_decode

    if torch.is_autocast_enabled(q.device.type):
        q = q.to(torch.get_autocast_dtype(q.device.type))
    batch, heads = q.shape[0], len(segments[0]) // q.shape[0] if k.dim() == 2 else k.shape[1]
    if k.dim() == 2:
        k, v = (x.to(q.dtype).expand(batch, heads, -1, -1) for x in (k, v))
    else:
        k, v = (x.to(q.dtype).transpose(0, 1).expand(batch, -1, -1, -1) for x in (k, v))
    options: dict[str, Any] = dict(ramp=float(ramp), include_self=include_self, scale=1 / math.sqrt(q.shape[-1]))
    options.update(relative_keys=relative_keys, normalizer_eps=normalizer_eps, segments=segments)
    return triton_decode(q, k, v, span.expand(batch, -1), q_pos, k_pos.expand(batch, -1), **options)


def _cheap_to_check(q: Tensor) -> bool:
    return q.device.type == "cpu" and not torch.compiler.is_compiling()
