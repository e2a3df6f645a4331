"""The public operator: check the inputs, choose an implementation, call it."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Impl = Literal["auto", "reference", "chunked", "triton"]


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
    impl: Impl = "auto",
    check_values: bool | None = None,
) -> Tensor:
    """Attention over memories that expire: memory i is seen by query t with weight `clamp(1 + (span_i - age)/ramp, 0, 1)`.

    Args:
        q: queries [B, Hq, T, D].
        k, v: memories [B, Hkv, S, D]; Hkv divides Hq.
        span: how long each memory lives, in steps, >= 0: [B, S], or [B, Hkv, S] for a span per key/value head.
        q_pos: integer positions [T] or [B, T], never falling along a row.
        k_pos: integer positions [S], [B, S] or [B, Hkv, S], never falling along a row; any gaps.
        ramp: length of the soft edge, in steps, > 0.
        causal: memories after the query are unseen; False gives encoders, where age is |t - i|.
        include_self: whether age 0 is seen.
        scale: of the scores; 1/sqrt(D) by default.
        relative_keys: [M, D], learned embedding of distances 1..M: adds q . relative_keys[age - 1] to the scores.
        normalizer_eps: added to the normaliser as a share of the living memories' unmasked sum (the released code's 1e-8).
        impl: "reference" (dense definition), "chunked" (plain PyTorch over live lists), "triton" (GPU), or "auto".
        check_values: look for NaN or negative spans and falling positions; by default on the CPU only, since it waits
            for the device.

    Returns y [B, Hq, T, D]; a query with no living memory gets zero. Gradients reach q, k, v, span and relative_keys.
    """
    _check_shapes(q, k, v, span, q_pos, k_pos, ramp, relative_keys)
    if check_values if check_values is not None else _cheap_to_check(q):
        _check_values(span, q_pos, k_pos)
    chosen = resolve_impl(impl, q.device, relative_keys is not None or normalizer_eps > 0 or not causal)
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, kv_heads = k.shape[:2]
    span = span.unsqueeze(1) if span.dim() == 2 else span
    q_pos = q_pos.expand(batch, -1).unsqueeze(1)
    k_pos = k_pos.expand(batch, -1).unsqueeze(1) if k_pos.dim() < 3 else k_pos
    if span.shape[1] != k_pos.shape[1]:  # one of them is per head: so must both be
        span, k_pos = span.expand(-1, kv_heads, -1), k_pos.expand(-1, kv_heads, -1)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    options: dict[str, Any] = dict(ramp=float(ramp), causal=causal, include_self=include_self, scale=scale)
    if chosen == "triton":
        from .triton import triton_attention

        return triton_attention(q, k, v, span, q_pos, k_pos, **options)
    options.update(relative_keys=relative_keys, normalizer_eps=normalizer_eps)
    if chosen == "reference":
        from .reference import reference_attention

        span, q_pos, k_pos = (x.expand(-1, kv_heads, -1) for x in (span, q_pos, k_pos))
        return reference_attention(q, k, v, span, q_pos, k_pos, **options)
    from .chunked import chunked_attention

    return chunked_attention(q, k, v, span, q_pos, k_pos, **options)


def resolve_impl(impl: Impl, device: torch.device, needs_pytorch: bool = False) -> Impl:
    """What "auto" means here: chunked everywhere until a GPU kernel serves the request."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl must be one of {', '.join(get_args(Impl))}, got {impl!r}")
    if impl == "triton":
        raise ValueError("impl='triton' is not part of this version; use impl='chunked' or impl='auto'")
    return "chunked" if impl == "auto" else impl


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
    _expect("span", span, [(b, s), (b, kv_heads, s)])
    _expect("q_pos", q_pos, [(t,), (b, t)])
    _expect("k_pos", k_pos, [(s,), (b, s), (b, kv_heads, s)])
    if rel is not None and (rel.dim() != 2 or rel.shape[1] != d):
        raise ValueError(f"relative_keys must have shape (M, {d}), got {tuple(rel.shape)}")
    if not ramp > 0:
        raise ValueError(f"ramp must be greater than 0, got {ramp}")
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


def _check_values(span: Tensor, q_pos: Tensor, k_pos: Tensor) -> None:
    if span.numel():
        low = span.detach().amin().item()
        if math.isnan(low):
            raise ValueError(f"span must not be NaN, got {int(span.isnan().sum())} NaN of {span.numel()} values")
        if low < 0:
            raise ValueError(f"span must be 0 or more, got a smallest value of {low:g}")
    for name, pos in (("q_pos", q_pos), ("k_pos", k_pos)):
        falls = pos[..., 1:] < pos[..., :-1]
        if bool(falls.any()):
            where = int(falls.reshape(-1, falls.shape[-1]).any(0).nonzero()[0, 0])
            row = pos.reshape(-1, pos.shape[-1])[falls.reshape(-1, falls.shape[-1])[:, where].nonzero()[0, 0]]
            pair = f"{int(row[where])} then {int(row[where + 1])}"
            raise ValueError(
                f"{name} must not fall along a row, got {pair} at index {where}; sort the memories by position"
            )
