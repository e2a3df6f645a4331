"""The operator: outputs and gradients of every implementation against the definition in float64, document by document."""

from __future__ import annotations

import contextlib
import math
import random
import struct
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from expire_span.ops import expire_attention
from tests.error_budget import assert_all_within_budget

from .operator_definition import Problem, define, find_unseen

NAME = "operator"
SPANS = ("mixed", "short", "edges", "scattered", "alive", "infinite", "zero", "born dead", "equal ages")
STEPS = ("ones", "gaps", "jumps", "twins")
PACKINGS = ("none", "ids", "rows", "boundaries", "pair")
RAMPS = (1.0, 2.0**-20, 2.0**-7, 0.5, 5.0, 7.0, 16.0, 100.0, 0.3, 8.001, 1e-6)
SIMPLE: dict[str, Any] = dict(
    seed=0, dtype="float32", impl="reference", batch=1, kv_heads=1, group=1, queries=1, stored=0, dim=1, span_rows=0,
    spans="alive", span_dtype="same", ramp=1.0, causal=True, include_self=True, scale=0.0, relative=0, eps=0.0,
    steps="ones", start=0, positions="int64", k_rank=1, q_rank=1, packing="none", documents=1, hashed=False,
    grad=False, poison=False, transposed=False, summed=False, softcap=0.0, sinks=False,
)  # fmt: skip
SHORTEST_RAMP = 1e-5
"""Below, span + ramp may round to span, so that a call may be refused; if it is not, it must be right."""


def draw(rng: random.Random) -> dict[str, Any]:
    case = _draw_small(rng)
    if rng.random() < 0.02:
        case |= _draw_long(rng)
    if case["impl"] == "triton":
        _fit_kernels(case, rng)
    return case


def _draw_small(rng: random.Random) -> dict[str, Any]:
    few = rng.random() < 0.3
    return dict(
        seed=rng.randrange(10**6),
        dtype=rng.choice(["float64", "float32", "float32", "bfloat16", "float16"]),
        impl=rng.choices(["reference", "chunked", "auto", "triton"], [2, 6, 6, 0.3])[0],
        batch=rng.choice([1, 1, 1, 2, 3]),
        kv_heads=rng.choice([1, 1, 2, 3]),
        group=rng.choice([1, 1, 2]),
        queries=rng.choice([1, 2, 5, 16, 17]) if few else rng.choice([1, 7, 30, 63, 64, 65, 111, 128, 200]),
        stored=rng.choice([0, 0, 0, 1, 40, 111, 300]),
        dim=rng.choice([1, 3, 8, 16]),
        span_rows=rng.choice([0, 0, 1, 2, 3]),
        spans=rng.choice(SPANS),
        span_dtype=rng.choice(["same", "same", "same", "float32", "float64", "bfloat16"]),
        ramp=rng.choice(RAMPS),
        causal=rng.random() < 0.75,
        include_self=rng.random() < 0.6,
        scale=rng.choice([0.0, 0.0, 1.0, -0.5, 3.0]),
        relative=rng.choice([0, 0, 0, 1, 5, 16, 100]),
        eps=rng.choice([0.0, 0.0, 0.0, 1e-8, 1e-3, 0.5]),
        steps=rng.choice(STEPS),
        start=rng.choice([0, 0, 0, 1000, 10**6, 10**9, 2**40, -5]),
        positions=rng.choice(["int64", "int64", "int32", "none"]),
        k_rank=rng.choice([1, 1, 2, 3]),
        q_rank=rng.choice([1, 1, 2]),
        packing=rng.choice(PACKINGS) if rng.random() < 0.7 else "none",
        documents=rng.choice([1, 2, 3, 8, 40]),
        hashed=rng.random() < 0.3,
        grad=rng.random() < (0.3 if few else 0.8),
        poison=rng.random() < 0.2,
        transposed=rng.random() < 0.3,
        summed=rng.random() < 0.1,
        softcap=rng.choice([0.0, 0.0, 0.0, 0.5, 3.0, 50.0]),
        sinks=rng.random() < 0.2,
    )


def _draw_long(rng: random.Random) -> dict[str, Any]:
    queries = rng.choices([2048, 8192, 16384, 32768, 65536], [12, 4, 2, 1, 1])[0]
    return dict(
        batch=1, kv_heads=1, group=1, dim=4, queries=queries, stored=rng.choice([0, 500]), relative=0, steps="ones",
        impl=rng.choice(["chunked", "auto"]), k_rank=1, span_rows=0, grad=True, eps=0.0,
        spans=rng.choice(["mixed", "short", "edges"]), packing=rng.choice(["none", *PACKINGS]),
        documents=rng.choice([1, 8, queries // 256, queries // 64]), ramp=rng.choice([5.0, 8.0, 16.0]),
    )  # fmt: skip


def _fit_kernels(case: dict[str, Any], rng: random.Random) -> None:
    """Only what the kernels serve, small: they are interpreted."""
    case |= dict(dim=32, causal=True, batch=1, kv_heads=min(case["kv_heads"], 2), transposed=False)
    case["steps"] = (
        "gaps" if case["steps"] == "jumps" else case["steps"]
    )  # see docs/operator.md on long jumps in a tile
    case |= dict(queries=min(case["queries"], rng.choice([1, 17, 33])), stored=min(case["stored"], 40))
    case["dtype"] = "float32" if case["dtype"] == "float64" else case["dtype"]
    case["steps"] = "gaps" if case["relative"] and case["steps"] == "twins" else case["steps"]


def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    p = build(case)
    try:
        got = _run(p, case)
    except ValueError as refusal:
        if case["ramp"] < SHORTEST_RAMP and "ramp" in str(refusal):
            return
        raise
    exact = define(p, case, torch.float64)
    rounded = _round(p, case, exact)
    names = got.keys()
    terms = {n: exact[f"terms of {n}"] for n in names if f"terms of {n}" in exact}
    assert_all_within_budget(got, {n: exact[n] for n in names}, {n: rounded[n] for n in names}, terms=terms)


def _round(p: Problem, case: dict[str, Any], exact: dict[str, Tensor]) -> dict[str, Tensor]:
    """The definition with fewer digits; where it overflows and the result does not, with those of float32, rounded once."""
    fewer = define(p, case, torch.float32 if case["dtype"] == "float64" else getattr(torch, case["dtype"]))
    if all(t.isfinite().all() or not exact[n].isfinite().all() for n, t in fewer.items()):
        return fewer
    return {n: t.to(fewer[n].dtype) for n, t in define(p, case, torch.float32).items()}


def build(case: dict[str, Any]) -> Problem:
    g = torch.Generator().manual_seed(case["seed"])
    dtype, batch, kv_heads = getattr(torch, case["dtype"]), case["batch"], case["kv_heads"]
    queries, total = case["queries"], case["queries"] + case["stored"]
    ramp = struct.unpack("f", struct.pack("f", case["ramp"]))[0]
    rows = min(case["span_rows"], kv_heads)
    shape = (batch, rows, total) if rows else (batch, total)
    x = {
        "q": torch.randn(batch, kv_heads * case["group"], queries, case["dim"], generator=g),
        "k": torch.randn(batch, kv_heads, total, case["dim"], generator=g),
        "v": torch.randn(batch, kv_heads, total, case["dim"], generator=g),
    }
    x = {name: _laid_out(t.to(dtype), case["transposed"]) for name, t in x.items()}
    k_pos = _positions(case, total, g)
    span = _spans(case["spans"], shape, ramp, k_pos, g)
    x["span"] = span.to(dtype if case["span_dtype"] == "same" else getattr(torch, case["span_dtype"]))
    if case["sinks"] and not case["eps"]:  # the two are refused together
        x["sinks"] = torch.randn(kv_heads * case["group"], generator=g).mul(2).to(dtype)
    if case["relative"]:
        x["relative_keys"] = torch.randn(case["relative"], case["dim"], generator=g).to(dtype)
    own = (
        k_pos.reshape(-1, total)[:1]
        if case["q_rank"] == 1 or k_pos.dim() == 1
        else k_pos.reshape(batch, -1, total)[:, 0]
    )
    q_pos = own[:, case["stored"] :]
    x |= {"k_pos": k_pos, "q_pos": q_pos[0] if case["q_rank"] == 1 else q_pos.expand(batch, -1)}
    options: dict[str, Any] = dict(ramp=ramp, causal=case["causal"], include_self=case["include_self"])
    options |= dict(scale=case["scale"] or None, normalizer_eps=case["eps"], softcap=case["softcap"], impl=case["impl"])
    ids = _pack(case, g, options)
    unseen = find_unseen(x, options, ids)
    direction = torch.randn(x["q"].shape, generator=g).to(dtype)
    return Problem(x, options, ids, unseen, torch.ones_like(direction) if case["summed"] else direction)


def _laid_out(x: Tensor, transposed: bool) -> Tensor:
    """The same values, in memory as [B, T, H, D] if transposed, as models hold them."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x


def _positions(case: dict[str, Any], total: int, g: torch.Generator) -> Tensor:
    shape = {1: (total,), 2: (case["batch"], total), 3: (case["batch"], case["kv_heads"], total)}[case["k_rank"]]
    most = {"ones": 2, "gaps": 4, "jumps": 2, "twins": 2}[case["steps"]]
    steps = torch.randint(0 if case["steps"] == "twins" else 1, most, shape, generator=g)
    if case["steps"] == "jumps":
        steps = torch.where(torch.rand(shape, generator=g) < 0.05, 10**5, steps)
    return steps.cumsum(-1) + case["start"]


def _spans(kind: str, shape: tuple[int, ...], ramp: float, k_pos: Tensor, g: torch.Generator) -> Tensor:
    """Spans in steps of 1/64, so that all precisions agree on which side of an edge of the ramp a query lies."""
    u = torch.rand(shape, generator=g)
    if kind == "mixed":
        return (u**4 * 200 * 64).round() / 64
    if kind == "short":
        return (u * 18).round().div(2).sub(7).clamp_min(-ramp)
    if kind == "edges":
        return (u * 30).round()
    if kind == "scattered":
        return torch.where(u < 0.05, 1e6, 3.5)
    if kind == "equal ages":  # all die at the same step
        return (k_pos.max() - k_pos).reshape(-1, shape[-1])[0].expand(shape).float()
    value = {"alive": 1e6, "infinite": math.inf, "zero": 0.0, "born dead": -ramp}[kind]
    return torch.where(u < 0.8, torch.full(shape, value), (u * 640).round() / 64)


def _pack(case: dict[str, Any], g: torch.Generator, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Put the case's documents into the options; their ids for queries [B, T] and memories [B, S]."""
    batch, queries, stored = case["batch"], case["queries"], case["stored"]
    total = queries + stored
    rows = batch if case["packing"] == "rows" else 1
    ids = torch.randint(0, case["documents"], (rows, total), generator=g).sort(-1).values
    if case["hashed"]:
        ids = (torch.randint(-(2**61), 2**61, (case["documents"],), generator=g).sort().values)[ids]
    kind = "none" if case["documents"] == 1 else case["packing"]
    if kind == "none":
        ids = torch.zeros(1, total, dtype=torch.long)
    elif kind == "boundaries" and not stored:
        changes = (ids[0].diff() != 0).nonzero().flatten() + 1
        options["cu_seqlens"] = [0, *changes.tolist(), total]
    else:
        given = ids if kind == "rows" else ids[0]
        options["documents"] = (given[..., stored:], given) if stored or kind == "pair" else given
    ids = ids.expand(batch, -1)
    return ids[:, stored:], ids


def _run(p: Problem, case: dict[str, Any]) -> dict[str, Tensor]:
    """The output and, with `grad`, the gradients of an implementation."""
    x = {n: t.detach() for n, t in p.given.items()}
    if case["poison"]:
        for name in ("k", "v"):
            x[name] = x[name].masked_fill(p.unseen.unsqueeze(-1), math.nan)
    if case["positions"] == "int32" and case["start"] < 2**31:
        x |= {name: x[name].int() for name in ("q_pos", "k_pos")}
    if case["positions"] == "none" and case["steps"] == "ones":  # then they may be left out
        del x["q_pos"], x["k_pos"]
    leaves = [n for n, t in x.items() if t.is_floating_point() and case["grad"]]
    x |= {n: x[n].requires_grad_() for n in leaves}
    with _kernels() if case["impl"] == "triton" else contextlib.nullcontext(), torch.set_grad_enabled(case["grad"]):
        y = expire_attention(**x, **p.options)
        grads = torch.autograd.grad(y, [x[n] for n in leaves], p.direction) if leaves else ()
    # A gradient in float64 of a computation in float32 has the digits of float32.
    digits = torch.float64 if y.dtype == torch.float64 else torch.float32
    grads = [t.to(digits) if t.dtype == torch.float64 else t for t in grads]
    return {"y": y.detach()} | {f"d{n}": t for n, t in zip(leaves, grads)}


@contextlib.contextmanager
def _kernels() -> Iterator[None]:
    """The GPU kernels in Triton's interpreter, with small tiles."""
    import triton.language as tl

    from tests.triton_interpreter import SMALL, layout, lists, tuning

    few = [mock.patch.object(lists, "BLOCK", 64), mock.patch.object(layout, "SHORTEST", 8)]
    few += [mock.patch.object(lists, "FIRST_LIMIT", tl.constexpr(8))]
    with contextlib.ExitStack() as stack, mock.patch.dict("os.environ", TRITON_INTERPRET="1"):
        for patch in few:
            stack.enter_context(patch)
        tuning.override(SMALL)
        try:
            yield
        finally:
            tuning.override(None)
