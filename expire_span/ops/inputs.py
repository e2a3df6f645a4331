"""The operator's inputs: their defaults, the checks on them, and the dtype in which lifetimes are computed.

Every error is one sentence with the expected and the given value. Checks of shapes and dtypes always run. Checks of values make
the host wait for the device, so by default they run on the CPU only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd import forward_ad

from expire_span.checks import show

LONGEST_RAMP = 2.0**30
"""The GPU kernels count steps in 32-bit integers, which ramps must fit."""
SHORTEST_RAMP = 2.0**-30
"""Far shorter than the distance between any span and the next whole step, and 1 / ramp times any age is still a float32."""

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_tensors(**given: object) -> None:
    """Refuse lists, arrays and None where a tensor belongs."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; convert it by torch.as_tensor")
        if x.layout != torch.strided:
            raise ValueError(f"{name} must be a dense tensor, got layout {x.layout}; convert it by to_dense")


def default_positions(
    queries: int, memories: int, q_pos: Tensor | None, k_pos: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Positions 0..S-1 for the memories, the last T of them for the queries, where none are given."""
    if q_pos is not None and k_pos is not None:
        return q_pos, k_pos
    if q_pos is not None or k_pos is not None:
        given, missing = ("q_pos", "k_pos") if k_pos is None else ("k_pos", "q_pos")
        raise ValueError(f"q_pos and k_pos must be given together, got {given} without {missing}; give both or none")
    if queries > memories:
        raise ValueError(
            f"without positions the queries are the last of the memories, got {queries} queries and {memories} memories;"
            " give q_pos and k_pos"
        )
    every = torch.arange(memories, device=device)
    return every[memories - queries :], every


def lifetime_dtype(span: Tensor, q: Tensor) -> torch.dtype:
    """The dtype in which spans and ages are computed: float32, or float64 where spans and queries both are float64.

    A half-precision number cannot hold the ages of long-lived memories (float16 counts single steps up to 2048,
    bfloat16 up to 256). All implementations and the stores use the same precision, so that they agree on the step at which a
    memory dies.
    """
    return torch.float64 if span.dtype == q.dtype == torch.float64 else torch.float32


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, rel: Tensor | None
) -> None:
    (b, hq, t, d), (kv_heads, s) = q.shape, k.shape[1:3]
    hint = _layout_hint(q, k, span)
    if d == 0:
        raise ValueError(f"q must have a head dim of at least 1, got shape {tuple(q.shape)}")
    _expect("k", k, [(b, kv_heads, s, d)], hint)
    _expect("v", v, [(b, kv_heads, s, d)], hint)
    if kv_heads == 0 or hq % kv_heads:
        raise ValueError(f"the heads of k must divide those of q, got {kv_heads} and {hq}{hint}")
    rows = span.shape[1] if span.dim() == 3 and 0 < span.shape[1] < kv_heads else kv_heads
    _expect("span", span, [(b, s), (b, rows, s)], hint)
    _expect("q_pos", q_pos, [(t,), (b, t)], hint)
    _expect("k_pos", k_pos, [(s,), (b, s), (b, kv_heads, s)], hint)
    if rel is not None and (rel.dim() != 2 or rel.shape[1] != d):
        raise ValueError(f"relative_keys must have shape (M, {d}), got {tuple(rel.shape)}")


def check_relative_keys(rel: Tensor | None, q: Tensor) -> None:
    if rel is None:
        return
    check_tensors(relative_keys=rel)
    if rel.dtype not in _FLOATS:
        raise ValueError(
            f"relative_keys must be a float tensor of 64, 32 or 16 bits, got {rel.dtype}; convert it first"
        )
    if rel.device != q.device:
        raise ValueError(f"relative_keys is on {rel.device} but q is on {q.device}; move them to one device")


def check_rank(q: Tensor, k: Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must have 4 dimensions [B, H, T, D], got {tuple(q.shape)} and {tuple(k.shape)}")


def check_dtypes(q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor) -> None:
    if not {q.dtype, k.dtype, v.dtype} <= set(_FLOATS):
        raise ValueError(
            f"q, k and v must be float tensors of 64, 32 or 16 bits, got {q.dtype}, {k.dtype} and {v.dtype}; "
            "convert them first"
        )
    if not q.dtype == k.dtype == v.dtype and not torch.is_autocast_enabled(q.device.type):
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if span.dtype not in _FLOATS:
        raise ValueError(f"span must be a float tensor of 64, 32 or 16 bits, got {span.dtype}; convert it first")
    for name, pos in (("q_pos", q_pos), ("k_pos", k_pos)):
        if pos.dtype not in _INTEGERS:
            raise ValueError(f"{name} must be an integer tensor, got {pos.dtype}")
    for name, x in (("k", k), ("v", v), ("span", span), ("q_pos", q_pos), ("k_pos", k_pos)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device")
    if q.device.type == "meta":
        raise ValueError(
            f"the tensors are on the device {q.device}, which holds no numbers; give them on a CPU or a GPU"
        )


def check_numbers(ramp: float, scale: float | None, normalizer_eps: float) -> None:
    check_ramp(ramp)
    _check_single("normalizer_eps", normalizer_eps)
    if not 0 <= normalizer_eps < math.inf:
        raise ValueError(f"normalizer_eps must be 0 or a positive number, got {normalizer_eps}")
    if scale is not None:
        _check_single("scale", scale)
        if not math.isfinite(scale):
            raise ValueError(f"scale must be a finite number, got {scale}")


def check_softcap(softcap: float) -> None:
    _check_single("softcap", softcap)
    if not 0 <= softcap < math.inf:
        raise ValueError(f"softcap must be 0 (none) or a positive number, got {softcap}")


def check_sinks(sinks: Tensor | None, q: Tensor, normalizer_eps: float) -> None:
    if sinks is None:
        return
    check_tensors(sinks=sinks)
    if sinks.shape != (q.shape[1],) or sinks.dtype not in _FLOATS:
        raise ValueError(
            f"sinks must be a float tensor of shape ({q.shape[1]},), one logit for each query head, got {tuple(sinks.shape)} "
            f"of {sinks.dtype}"
        )
    if sinks.device != q.device:
        raise ValueError(f"sinks is on {sinks.device} but q is on {q.device}; move them to one device")
    if normalizer_eps:
        raise ValueError(
            f"sinks and normalizer_eps both add to the normaliser, got sinks and {normalizer_eps}; give one"
        )


def check_ramp(ramp: float) -> None:
    _check_single("ramp", ramp)
    if not SHORTEST_RAMP <= ramp <= LONGEST_RAMP:
        raise ValueError(f"ramp must be at least {SHORTEST_RAMP:g} and at most {LONGEST_RAMP:g}, got {ramp}")


def check_switches(**switches: object) -> None:
    for name, x in switches.items():
        if not isinstance(x, bool):
            raise ValueError(f"{name} must be True or False, got {x!r}")


def _check_single(name: str, x: object) -> None:
    single = isinstance(x, (int, float)) or getattr(x, "ndim", None) == 0 or (isinstance(x, Tensor) and x.numel() == 1)
    if not single or isinstance(x, bool):
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r}"
        raise ValueError(f"{name} must be one number, got {got}")


def _expect(name: str, x: Tensor, shapes: list[tuple[int, ...]], hint: str = "") -> None:
    if tuple(x.shape) not in shapes:
        wanted = " or ".join(str(s) for s in dict.fromkeys(shapes))
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(x.shape)}{hint}")


def _layout_hint(q: Tensor, k: Tensor, span: Tensor) -> str:
    """What to add to a message about shapes where these fit the layout [B, T, H, D] of other libraries."""
    fits = span.dim() in (2, 3) and span.shape[-1] == k.shape[1] != k.shape[2] and q.shape[2] % max(k.shape[2], 1) == 0
    return "; q, k and v look like [B, T, H, D]: give them as [B, H, T, D], by transpose(1, 2)" if fits else ""


def transformed(*tensors: Tensor | None) -> str | None:
    """The transform of torch.func, or forward-mode differentiation, that a call runs under; None outside of both."""
    if torch.compiler.is_compiling():
        return None
    function = _function_transform()
    if function is not None:
        return function
    if getattr(forward_ad, "_current_level", 0) < 0:  # outside of dual levels, which saves asking every tensor
        return None
    dual = any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    return "forward-mode differentiation" if dual else None


def _function_transform() -> str | None:
    """The innermost transform of torch.func that is active, read from torch's own stack of them; None if there is none.

    Torch has no public function for this. With a torch version that lacks these names, the call is refused all the same, but by
    torch: an autograd.Function without setup_context cannot be transformed.
    """
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    innermost = peek() if peek is not None else None
    if innermost is None:
        return None
    key = getattr(innermost, "key", None)
    return f"torch.func ({str(getattr(key(), 'name', key())).lower()})" if key is not None else "torch.func"


def check_values(span: Tensor, q_pos: Tensor, k_pos: Tensor, ramp: float) -> None:
    """Refuse NaN spans, spans below -ramp, and positions that decrease along a row. The host waits for the device."""
    check_spans(span, ramp)
    _check_rising("q_pos", q_pos)
    _check_rising("k_pos", k_pos)


def check_spans(span: Tensor, ramp: float) -> None:
    """Refuse NaN and spans below -ramp. A memory with span -ramp is dead at birth, so a shorter span would mean nothing."""
    if not span.numel():
        return
    low = span.detach().amin().item()
    if math.isnan(low):
        raise ValueError(f"span must not be NaN, got {int(span.isnan().sum())} NaN of {span.numel()} values")
    if low < -ramp * (1 + torch.finfo(span.dtype).eps):  # -ramp itself may have been rounded
        raise ValueError(f"span must be -ramp or more, {-ramp:g} here, got a smallest value of {low:g}")


def _check_rising(name: str, pos: Tensor) -> None:
    falls = pos[..., 1:] < pos[..., :-1]
    if not bool(falls.any()):
        return
    where = int(falls.reshape(-1, falls.shape[-1]).any(0).nonzero()[0, 0])
    row = pos.reshape(-1, pos.shape[-1])[falls.reshape(-1, falls.shape[-1])[:, where].nonzero()[0, 0]]
    pair, advice = f"{int(row[where])} then {int(row[where + 1])}", "sort the memories by position"
    if row[where + 1] == row[0]:  # they begin anew, as in rows of packed documents
        advice = "packed documents are given by cu_seqlens or documents, without positions"
    raise ValueError(f"{name} must not decrease along a row, got {pair} at index {where}; {advice}")


def check_distinct(q_pos: Tensor, k_pos: Tensor, window: int, ids: tuple[Tensor, Tensor] | None) -> None:
    """Refuse two memories at one position: the kernels store one gradient per query and age, for ages up to `window`."""
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


def as_boundaries(cu_seqlens: Tensor | Sequence[int], queries: int, memories: int, check: bool) -> Tensor:
    """cu_seqlens as an integer tensor [documents + 1], refused unless it rises from 0 to T."""
    if not isinstance(cu_seqlens, Tensor):
        try:
            cu_seqlens = torch.tensor([operator.index(x) for x in cu_seqlens], dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:  # not a sequence, not integers, or beyond 64 bits
            raise ValueError(f"cu_seqlens must hold integers, got {show(cu_seqlens)}") from error
    if cu_seqlens.dtype not in _INTEGERS or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        got = f"shape {tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
        raise ValueError(f"cu_seqlens must be integers of shape (documents + 1,), got {got}")
    if queries != memories:
        raise ValueError(
            f"cu_seqlens needs as many memories as queries, got {memories} and {queries}; give documents=(ids of the"
            " queries, ids of the memories)"
        )
    if check or (cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()):
        _check_boundaries(cu_seqlens.tolist(), queries)
    return cu_seqlens.long()


def _check_boundaries(bounds: list[int], queries: int) -> None:
    if bounds[0] != 0 or bounds[-1] != queries:
        lengths = "; these look like lengths: give their running sum after a 0" if sum(bounds) == queries else ""
        ends = f"got {bounds[0]} and {bounds[-1]}"
        raise ValueError(f"cu_seqlens must begin with 0 and end with the number of queries, {queries}, {ends}{lengths}")
    for early, late in pairwise(bounds):
        if late < early:
            raise ValueError(
                f"cu_seqlens must not decrease, got {early} then {late}; give the documents' boundaries in order"
            )
