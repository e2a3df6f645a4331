"""The public operator: check the inputs, choose an implementation, call it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import inputs
from .choice import DECODE_QUERIES, Impl, resolve_impl
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
    inputs.check_tensors(q=q, k=k, v=v, span=span)
    inputs.check_rank(q, k)
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
    ids = document_ids(documents, cu_seqlens, q, k.shape[2], check)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    chosen = resolve_impl(impl, q.device, causal=causal, head_dim=q.shape[-1], dtype=q.dtype, capped=bool(softcap), sinks=sinks is not None)
    # The fast implementations define first derivatives only, none of torch.func's transforms.
    if transform is not None and chosen != "reference":
        raise ValueError(f"under {transform} the operator needs impl='reference', got impl={impl!r}")
    if q.shape[0] == 0 or q.shape[2] == 0:
        return q.clone()  # no rows or no queries: y is empty like q
    span = span.to(inputs.lifetime_dtype(span, q))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    options = (float(ramp), include_self, scale, relative_keys, normalizer_eps, float(softcap), sinks)
    call = _Call(q, k, v, span, q_pos.long(), k_pos.long(), ids, *options)
    if chosen == "triton":
        return _run_triton(call, deterministic, check)
    return _run_reference(call, causal) if chosen == "reference" else _run_chunked(call, causal)


@dataclass(frozen=True)
class _Call:
    """The checked arguments of a call: positions are int64, spans have the dtype in which lifetimes are computed."""

    q: Tensor
    k: Tensor
    v: Tensor
    span: Tensor
    q_pos: Tensor
    k_pos: Tensor
    ids: tuple[Tensor, Tensor] | None
    ramp: float
    include_self: bool
    scale: float
    relative_keys: Tensor | None
    normalizer_eps: float
    softcap: float
    sinks: Tensor | None

    @property
    def options(self) -> dict[str, Any]:
        """The options that every implementation takes, `documents` apart."""
        return dict(ramp=self.ramp, include_self=self.include_self, scale=self.scale)

    @property
    def paper_options(self) -> dict[str, Any]:
        """The two options that only the paper's models use: relative keys and the epsilon of the normaliser."""
        return dict(relative_keys=self.relative_keys, normalizer_eps=self.normalizer_eps)

    @property
    def model_options(self) -> dict[str, Any]:
        """Two options that pretrained models use: soft caps and sinks."""
        return dict(softcap=self.softcap, sinks=self.sinks)

    @property
    def learns(self) -> bool:
        leaves = (self.q, self.k, self.v, self.span, self.relative_keys, self.sinks)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)

    @property
    def decodes(self) -> bool:
        """Whether there are so few queries, without gradient, that a single pass without live lists is faster."""
        return self.q.shape[2] <= DECODE_QUERIES and not self.learns

    def lifetimes_by_head(self) -> tuple[Tensor, Tensor, Tensor]:
        """span [B, P, S], q_pos [B, 1, T] and k_pos [B, P, S], where P is 1, or Hkv if either is given per head."""
        (batch, kv_heads), span, k_pos = self.k.shape[:2], self.span, self.k_pos
        span = span.unsqueeze(1) if span.dim() == 2 else spans_of_heads(span, kv_heads)
        q_pos = self.q_pos.expand(batch, -1).unsqueeze(1)
        k_pos = k_pos.expand(batch, -1).unsqueeze(1) if k_pos.dim() < 3 else k_pos
        if span.shape[1] != k_pos.shape[1]:  # one of them is given per head, so the other is expanded
            span, k_pos = span.expand(-1, kv_heads, -1), k_pos.expand(-1, kv_heads, -1)
        return span, q_pos, k_pos


def _run_triton(call: _Call, deterministic: bool, check: bool) -> Tensor:
    """Call the GPU kernels. They take spans and positions in the shapes given, since every view costs host time."""
    from .triton import triton_attention, triton_decode

    decodes, span = call.decodes, call.span
    if call.k_pos.dim() == 3 or decodes:
        span = spans_of_heads(span, call.k.shape[1])
    tensors = (call.q, call.k, call.v, span, call.q_pos, call.k_pos)
    if decodes and call.ids is None:
        return triton_decode(*tensors, **call.options, **call.paper_options)
    if check and call.relative_keys is not None and call.learns:
        inputs.check_distinct(call.q_pos, call.k_pos, call.relative_keys.shape[0], call.ids)
    return triton_attention(
        *tensors, **call.options, **call.paper_options, documents=call.ids, deterministic=deterministic
    )


def _run_chunked(call: _Call, causal: bool) -> Tensor:
    tensors = (call.q, call.k, call.v, *call.lifetimes_by_head())
    if call.decodes and call.k.shape[2] and call.relative_keys is None and call.normalizer_eps == 0:
        from .decode import decode_attention

        return decode_attention(*tensors, causal=causal, documents=call.ids, **call.options, **call.model_options)
    from .chunked import chunked_attention

    options = call.options | call.paper_options | call.model_options
    return chunked_attention(*tensors, causal=causal, documents=call.ids, **options)


def _run_reference(call: _Call, causal: bool) -> Tensor:
    from .reference import reference_attention

    tensors = (call.q, call.k, call.v, *(x.expand(-1, call.k.shape[1], -1) for x in call.lifetimes_by_head()))
    options = call.options | call.paper_options | call.model_options
    return reference_attention(*tensors, causal=causal, documents=call.ids, **options)


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


def spans_of_heads(span: Tensor, kv_heads: int) -> Tensor:
    """Expand spans [B, P, S] with P in 1..Hkv to one row per head, [B, Hkv, S]; P = 1, shared by all heads, stays."""
    if span.dim() == 2 or span.shape[1] in (1, kv_heads):
        return span
    shared = span[:, -1:].expand(-1, kv_heads - span.shape[1], -1)
    return torch.cat([span, shared], 1)


def _cheap_to_check(q: Tensor) -> bool:
    return q.device.type == "cpu" and not torch.compiler.is_compiling()
