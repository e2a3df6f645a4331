"""The public operator: check the inputs, choose an implementation, call it."""

from __future__ import annotations

import importlib.util
import math
import os
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from .documents import Documents, document_ids, move_apart

Impl = Literal["auto", "reference", "chunked", "triton"]

TRITON_HEAD_DIMS = (32, 64, 96, 128, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
DECODE_QUERIES = 16
"""Up to this many queries a row without gradient are served by the decode kernel."""


def expire_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Tensor,
    q_pos: Tensor,
    k_pos: Tensor,
    *,
    ramp: float,
    causal: bool = True,
    include_self: bool = True,
    scale: float | None = None,
    relative_keys: Tensor | None = None,
    normalizer_eps: float = 0.0,
    documents: Documents | None = None,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
    impl: Impl = "auto",
    check_values: bool | None = None,
) -> Tensor:
    """Attention over memories that expire: memory i is seen by query t with weight `clamp(1 + (span_i - age)/ramp, 0, 1)`.

    Args:
        q: queries [B, Hq, T, D].
        k, v: memories [B, Hkv, S, D]; Hkv divides Hq.
        span: how long each memory has full weight, in steps, >= -ramp (below 0 it is born on its ramp): [B, S], or
            [B, P, S] with P of 1..Hkv: the first P - 1 key/value heads have spans of their own, and all others share the last.
        q_pos: integer positions [T] or [B, T], never falling along a row.
        k_pos: integer positions [S], [B, S] or [B, Hkv, S], never falling along a row; any gaps.
        ramp: length of the soft edge, in steps, > 0.
        causal: memories after the query are unseen; False gives encoders, where age is |t - i|.
        include_self: whether age 0 is seen.
        scale: of the scores; 1/sqrt(D) by default.
        relative_keys: [M, D], learned embedding of distances 1..M: adds q . relative_keys[age - 1] to the scores. With
            gradients in triton, memories that live at the same time must have different positions.
        normalizer_eps: added to the normaliser as a share of the living memories' unmasked sum (the released code's 1e-8).
        documents: packed documents: integer ids, never falling along a row, of the tokens ([T] or [B, T], where S = T), or
            a pair (of the queries, of the memories). No attention and no lifetime crosses from one to another.
        cu_seqlens: the same as boundaries [0, n1, n1 + n2, ..., T], one list for all rows.
        deterministic: gradients that are bitwise equal from run to run on a GPU, at some cost; on where
            torch.use_deterministic_algorithms is.
        impl: "reference" (dense definition), "chunked" (plain PyTorch over live lists), "triton" (GPU), or "auto".
        check_values: look for NaN, spans below -ramp and falling positions; by default on the CPU only, since it waits
            for the device.

    Returns y [B, Hq, T, D]; a query with no living memory gets zero. Gradients reach q, k, v, span and relative_keys.
    """
    _check_shapes(q, k, v, span, q_pos, k_pos, ramp, relative_keys)
    check = check_values if check_values is not None else _cheap_to_check(q)
    if check:
        _check_values(span, q_pos, k_pos, ramp)
    ids = document_ids(documents, cu_seqlens, q.shape[0], q.shape[2], k.shape[2], check)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    chosen = resolve_impl(impl, q.device, causal=causal, head_dim=q.shape[-1], dtype=q.dtype)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    options: dict[str, Any] = dict(ramp=float(ramp), include_self=include_self, scale=scale)
    extra: dict[str, Any] = dict(relative_keys=relative_keys, normalizer_eps=normalizer_eps)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, span, relative_keys))
    few = q.shape[2] <= DECODE_QUERIES and not learns
    if chosen == "triton":
        from .triton import triton_attention, triton_decode

        if k_pos.dim() == 3 or few:
            span = spans_of_heads(span, k.shape[1])
        if few and ids is None:
            return triton_decode(q, k, v, span, q_pos, k_pos, **options, **extra)
        if check and learns and relative_keys is not None:
            _check_distinct(q_pos, k_pos, relative_keys.shape[0], ids)
        extra.update(documents=ids, deterministic=deterministic)
        return triton_attention(q, k, v, span, q_pos, k_pos, **options, **extra)
    span, q_pos, k_pos = _with_heads(span, q_pos, k_pos, *k.shape[:2])
    if ids is not None:
        span, q_pos, k_pos = move_apart(ids, span, q_pos, k_pos)
    options.update(causal=causal)
    if chosen == "chunked" and few and k.shape[2] and relative_keys is None and normalizer_eps == 0:
        from .decode import decode_attention

        return decode_attention(q, k, v, span, q_pos, k_pos, **options)
    options.update(extra)
    if chosen == "reference":
        from .reference import reference_attention

        span, q_pos, k_pos = (x.expand(-1, k.shape[1], -1) for x in (span, q_pos, k_pos))
        return reference_attention(q, k, v, span, q_pos, k_pos, **options)
    from .chunked import chunked_attention

    return chunked_attention(q, k, v, span, q_pos, k_pos, **options)


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
    """The operator for a few queries over a store whose rows lie in flat buffers; read in place, without gradients.

    q [B, Hq, T, D], q_pos [T]; k, v [slots, D] and a row per key/value head, or [slots, Hkv, D] and a row per batch row;
    span and k_pos [slots]. segments: see `triton_decode`. Ask `can_attend_in_segments` first.
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


def can_attend_in_segments(impl: Impl, device: torch.device, queries: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether rows of unequal length are read where they lie: few queries, on a GPU that the kernels serve."""
    few = queries <= DECODE_QUERIES and not torch.is_grad_enabled()
    return few and resolve_impl(impl, device, head_dim=head_dim, dtype=dtype) == "triton"


def _with_heads(span: Tensor, q_pos: Tensor, k_pos: Tensor, batch: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """span [B, P, S], q_pos [B, 1, T] and k_pos [B, P, S], where P is 1, or Hkv if either is given per head."""
    span = span.unsqueeze(1) if span.dim() == 2 else spans_of_heads(span, kv_heads)
    q_pos = q_pos.expand(batch, -1).unsqueeze(1)
    k_pos = k_pos.expand(batch, -1).unsqueeze(1) if k_pos.dim() < 3 else k_pos
    if span.shape[1] != k_pos.shape[1]:  # one of them is per head: so must both be
        span, k_pos = span.expand(-1, kv_heads, -1), k_pos.expand(-1, kv_heads, -1)
    return span, q_pos, k_pos


def spans_of_heads(span: Tensor, kv_heads: int) -> Tensor:
    """Spans [B, P, S] with P of 1..Hkv for each head: [B, Hkv, S], or as they are where all heads share one."""
    if span.dim() == 2 or span.shape[1] in (1, kv_heads):
        return span
    shared = span[:, -1:].expand(-1, kv_heads - span.shape[1], -1)
    return torch.cat([span, shared], 1)


def resolve_impl(
    impl: Impl,
    device: torch.device,
    *,
    causal: bool = True,
    head_dim: int | None = None,
    dtype: torch.dtype | None = None,
) -> Impl:
    """What "auto" means here: triton on a GPU that can serve the request, chunked elsewhere.

    A head_dim or dtype that is not given counts as served.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if impl in ("reference", "chunked"):
        return impl
    if impl == "auto" and device.type != "cuda":
        return "chunked"
    obstacle = _triton_obstacle(device, causal, head_dim, dtype)
    if impl == "triton" and obstacle:
        raise ValueError(f"impl='triton' {obstacle}; use impl='chunked' or impl='auto'")
    return "chunked" if obstacle else "triton"


def _triton_obstacle(device: torch.device, causal: bool, head_dim: int | None, dtype: torch.dtype | None) -> str | None:
    """Why the GPU kernels cannot serve this, or None."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"needs a CUDA device, got {device.type}"
    if device.type == "cuda" and _capability(device) < (8, 0):
        major, minor = _capability(device)
        return f"needs compute capability 8.0 or higher, got {major}.{minor}"
    if not _TRITON_INSTALLED:
        return "needs the triton package, which is not installed"
    if head_dim is not None and head_dim not in TRITON_HEAD_DIMS:
        return f"serves head dims {', '.join(map(str, TRITON_HEAD_DIMS))}, got {head_dim}"
    if dtype is not None and dtype not in TRITON_DTYPES:
        return f"serves bfloat16, float16 and float32, got {str(dtype).removeprefix('torch.')}"
    if not causal:
        return "serves causal=True, got causal=False"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)
    return properties.major, properties.minor


def _cheap_to_check(q: Tensor) -> bool:
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def _check_shapes(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, ramp: float, rel
) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must have 4 dimensions [B, H, T, D], got {tuple(q.shape)} and {tuple(k.shape)}")
    (b, hq, t, d), (kv_heads, s) = q.shape, k.shape[1:3]
    _expect("k", k, [(b, kv_heads, s, d)])
    _expect("v", v, [(b, kv_heads, s, d)])
    if kv_heads == 0 or hq % kv_heads:
        raise ValueError(f"the heads of k must divide those of q, got {kv_heads} and {hq}")
    rows = span.shape[1] if span.dim() == 3 and 0 < span.shape[1] < kv_heads else kv_heads
    _expect("span", span, [(b, s), (b, rows, s)])
    _expect("q_pos", q_pos, [(t,), (b, t)])
    _expect("k_pos", k_pos, [(s,), (b, s), (b, kv_heads, s)])
    if rel is not None and (rel.dim() != 2 or rel.shape[1] != d):
        raise ValueError(f"relative_keys must have shape (M, {d}), got {tuple(rel.shape)}")
    if not ramp > 0:
        raise ValueError(f"ramp must be greater than 0, got {ramp}")
    if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not span.is_floating_point():
        raise ValueError(f"span must be a float tensor, got {span.dtype}")
    for name, pos in (("q_pos", q_pos), ("k_pos", k_pos)):
        if pos.is_floating_point() or pos.dtype == torch.bool:
            raise ValueError(f"{name} must be an integer tensor, got {pos.dtype}")
    for name, x in (("k", k), ("v", v), ("span", span), ("q_pos", q_pos), ("k_pos", k_pos)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device")


def _expect(name: str, x: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if tuple(x.shape) not in shapes:
        wanted = " or ".join(str(s) for s in dict.fromkeys(shapes))
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}")


def _check_values(span: Tensor, q_pos: Tensor, k_pos: Tensor, ramp: float) -> None:
    if span.numel():
        low = span.detach().amin().item()
        if math.isnan(low):
            raise ValueError(f"span must not be NaN, got {int(span.isnan().sum())} NaN of {span.numel()} values")
        if low < -ramp:
            raise ValueError(f"span must be -ramp or more, {-ramp:g} here, got a smallest value of {low:g}")
    for name, pos in (("q_pos", q_pos), ("k_pos", k_pos)):
        falls = pos[..., 1:] < pos[..., :-1]
        if bool(falls.any()):
            where = int(falls.reshape(-1, falls.shape[-1]).any(0).nonzero()[0, 0])
            row = pos.reshape(-1, pos.shape[-1])[falls.reshape(-1, falls.shape[-1])[:, where].nonzero()[0, 0]]
            pair = f"{int(row[where])} then {int(row[where + 1])}"
            raise ValueError(
                f"{name} must not fall along a row, got {pair} at index {where}; sort the memories by position"
            )


def _check_distinct(q_pos: Tensor, k_pos: Tensor, window: int, ids: tuple[Tensor, Tensor] | None) -> None:
    """The kernels keep one gradient for each query and age up to `window`."""
    k_pos = k_pos if k_pos.dim() == 3 else k_pos.unsqueeze(-2)  # [B, P, S] or [1, S]
    early, late = k_pos[..., :-1], k_pos[..., 1:]
    twins = (early == late) & (late >= q_pos.unsqueeze(-2)[..., :1] - window)
    if ids is not None:
        twins = twins & (ids[1][:, None, 1:] == ids[1][:, None, :-1])
    if bool(twins.any()):
        where = int(late.expand_as(twins)[twins][0])
        raise ValueError(
            f"with relative_keys, impl='triton' needs memories at different positions, got two at {where};"
            " number them differently or use impl='chunked'"
        )
