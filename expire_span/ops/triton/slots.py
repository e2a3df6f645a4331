"""One decoding step over slots (store/slots.py) as one kernel: from projections to the attention's output.

The first program of a query head of a row normalises and rotates the query and the new key, predicts the new memory's span,
appends it to the fresh slots, and attends to what lives. How many slots there are to read, and which fresh slot is next, are
numbers on the device, so that a launch recorded in a CUDA graph stays valid while they change. Further programs of the same head
share its tiles of slots (slot_tiles.py says how many there are), and a second kernel adds their partial sums.

The slot that is written is never read in the same launch: programs compute the new memory from its projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from expire_span.ops.slots import SpanForm

from .forward import LOG2E
from .launch import run_kernel
from .layout import power_of_2
from .slot_tiles import Division, tiles


class Fields(NamedTuple):
    """The buffers of slots, as `Slots` names them."""

    k: Tensor
    v: Tensor
    pos: Tensor
    edge: Tensor
    counts: Tensor
    bounds: Tensor


@triton.jit
def _place(x, cos, sin, column, d, inside, norm_eps, D: tl.constexpr, QK_NORM: tl.constexpr, ROTARY: tl.constexpr):
    """One query or key [D_PAD], normalised and rotated, rounded to the model's dtype after each."""
    kind = x.dtype.element_ty
    here = tl.load(x + d, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if QK_NORM:
        scale = tl.math.rsqrt(tl.sum(here * here, 0) / D + norm_eps)
        here = (here * scale).to(kind).to(tl.float32)
    if ROTARY:
        there = tl.load(x + (d + D // 2) % D, mask=inside, other=0.0).to(tl.float32)
        if QK_NORM:
            there = (there * scale).to(kind).to(tl.float32)
        at = column * D + d
        here = here * tl.load(cos + at, mask=inside, other=0.0) + there * tl.load(sin + at, mask=inside, other=0.0)
        here = here.to(kind).to(tl.float32)
    return here


@triton.jit
def _attend_tiles(
    q, keys_of, values_of, pos_of, edge_of, relative, now, end, first, step, scale, inv_ramp, d, inside,
    WINDOW: tl.constexpr, EPS: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, SKIP_DEAD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Attend from one query to every `step`-th tile of its head's slots: values summed by weight [D_PAD], the weights' sum, and
    the largest score. Slots before FRESH that this block of steps has not written yet, and slots from `end` on, are empty."""
    if APART:
        acc = tl.zeros([BLOCK_N, D_PAD], tl.float32)
        total = tl.zeros([BLOCK_N], tl.float32)
        peak = tl.full([BLOCK_N], float("-inf"), tl.float32)
    else:
        acc = tl.zeros([D_PAD], tl.float32)
        total = 0.0
        peak = float("-inf")
    for tile in tl.range(first, tl.cdiv(end, BLOCK_N), step, num_stages=STAGES):
        i = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        held = (i < end) & ((i >= FRESH) | (i < now))
        age = now.to(tl.float32) - tl.load(pos_of + i, mask=held, other=0.0)
        left = tl.load(edge_of + i, mask=held, other=float("-inf")) - age
        alive = held & (left > 0)
        at = i[:, None] * D + d[None, :]
        read = (alive if SKIP_DEAD else held)[:, None] & inside[None, :]
        keys = tl.load(keys_of + at, mask=read, other=0.0).to(tl.float32)
        values = tl.load(values_of + at, mask=read, other=0.0).to(tl.float32)
        if WINDOW > 0:
            near = alive & (age >= 1) & (age <= WINDOW)
            far = (age - 1).to(tl.int32)[:, None] * D + d[None, :]
            keys += tl.load(relative + far, mask=near[:, None] & inside[None, :], other=0.0).to(tl.float32)
        s = tl.where(alive, tl.sum(keys * q[None, :], 1) * scale, float("-inf"))
        new_peak = tl.maximum(peak, s if APART else tl.max(s, 0))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        e = tl.math.exp2(s - safe)
        p = tl.where(alive, tl.minimum(left * inv_ramp, 1.0) * e, 0.0)
        fade = tl.math.exp2(peak - safe)
        if APART:
            total = total * fade + p + EPS * e
            acc = acc * fade[:, None] + p[:, None] * values
        else:
            total = total * fade + tl.sum(p + EPS * e, 0)
            acc = acc * fade + tl.sum(p[:, None] * values, 0)
        peak = new_peak
    if APART:
        best = tl.max(peak, 0)
        rise = tl.math.exp2(peak - tl.where(best == float("-inf"), 0.0, best))
        total = tl.sum(total * rise, 0)
        acc = tl.sum(acc * rise[:, None], 0)
        peak = best
    return acc, total, peak


@triton.jit
def _predict_span(
    hidden, weight, bias, low, room, h, c, width, hidden_eps, HIDDEN_NORM: tl.constexpr
):  # fmt: skip
    """The new memory's span in key/value head h, from the hidden state of its row."""
    state = tl.load(hidden + c, mask=c < width, other=0.0).to(tl.float32)
    predictor = tl.load(weight + h * width + c, mask=c < width, other=0.0)
    logit = tl.sum(state * predictor, 0)
    if HIDDEN_NORM:
        logit = logit / tl.sqrt(tl.sum(state * state, 0) / width + hidden_eps)
    logit += tl.load(bias + h)
    return tl.load(low + h) + tl.load(room + h) / (1.0 + tl.exp(-logit))


@triton.jit
def _attend_self(acc, total, peak, q, k_new, v_new, left, scale, inv_ramp, EPS: tl.constexpr):
    """Add the new memory, which has `left` steps to live, to the sums of its own query."""
    s = tl.where(left > 0, tl.sum(k_new * q, 0) * scale, float("-inf"))
    new_peak = tl.maximum(peak, s)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    e, fade = tl.math.exp2(s - safe), tl.math.exp2(peak - safe)
    p = tl.maximum(tl.minimum(left * inv_ramp, 1.0), 0.0) * e
    return acc * fade + p * v_new, total * fade + p + EPS * e, new_peak


@triton.jit
def _step(
    proj, hidden, weight, bias, low, room, cos, sin, relative,  # read: q, k, v of the token, its span's predictor, positions
    k, v, pos, edge,  # read and written: the slots
    counts, bounds, column, programs,  # read: how full and where the heads' slots are, the time, the division of the work
    y, parts, peaks, totals,  # written
    width, slots, kv_heads, group, proj_b, hidden_b,  # sizes and strides
    scale, ramp, inv_ramp, norm_eps, hidden_eps,
    QK_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr, ROTARY: tl.constexpr, MIN_AGE: tl.constexpr, WINDOW: tl.constexpr,
    EPS: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, C_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, SKIP_DEAD: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of one query head of one row. The head's first program also appends the new memory."""
    b, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, first, step = (
        tl.load(programs + 3 * program),
        tl.load(programs + 3 * program + 1),
        tl.load(programs + 3 * program + 2),
    )
    heads = kv_heads * group
    h = head // group
    d, c = tl.arange(0, D_PAD), tl.arange(0, C_PAD)
    inside = d < D
    now = tl.load(column)
    mine = proj + b * proj_b
    q = _place(mine + head * D, cos, sin, now, d, inside, norm_eps, D, QK_NORM, ROTARY)
    # Addresses are those of the head's first slot plus 32-bit offsets: half the registers of 64-bit ones.
    base = b * slots + tl.load(bounds + h)
    keys_of, values_of, pos_of, edge_of = k + base * D, v + base * D, pos + base, edge + base
    end = FRESH + tl.load(counts + b * kv_heads + h)
    acc, total, peak = _attend_tiles(
        q, keys_of, values_of, pos_of, edge_of, relative, now, end, first, step, scale, inv_ramp, d, inside,
        WINDOW, EPS, FRESH, D, D_PAD, BLOCK_N, STAGES, SKIP_DEAD, APART,
    )  # fmt: skip
    if first == 0:
        k_new = _place(mine + (heads + h) * D, cos, sin, now, d, inside, norm_eps, D, QK_NORM, ROTARY)
        v_new = tl.load(mine + (heads + kv_heads + h) * D + d, mask=inside, other=0.0).to(tl.float32)
        state = hidden + b * hidden_b
        left = _predict_span(state, weight, bias, low, room, h, c, width, hidden_eps, HIDDEN_NORM) + ramp
        if head % group == 0:
            at = now * D + d
            tl.store(keys_of + at, k_new.to(k.dtype.element_ty), mask=inside)
            tl.store(values_of + at, v_new.to(v.dtype.element_ty), mask=inside)
            tl.store(edge_of + now, left)
        if MIN_AGE == 0:
            acc, total, peak = _attend_self(acc, total, peak, q, k_new, v_new, left, scale, inv_ramp, EPS)
    if step == 1:
        acc = acc / tl.where(total > 0, total, 1.0)
        tl.store(y + (b * heads + head) * D + d, acc.to(y.dtype.element_ty), mask=inside)
    else:
        out = b * tl.num_programs(1) + program
        tl.store(parts + out * D_PAD + d, acc)
        tl.store(peaks + out, peak)
        tl.store(totals + out, total)


@triton.jit
def _join(
    parts, peaks, totals, joins, y, heads, parts_b, D: tl.constexpr, D_PAD: tl.constexpr, MOST: tl.constexpr
):  # fmt: skip
    """Add the partial sums of one query head that has several programs."""
    b, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head, first, count = tl.load(joins + 3 * which), tl.load(joins + 3 * which + 1), tl.load(joins + 3 * which + 2)
    d, n = tl.arange(0, D_PAD), tl.arange(0, MOST)
    there, at = n < count, b * parts_b + first + n
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    best = tl.max(peak, 0)
    rise = tl.math.exp2(peak - tl.where(best == float("-inf"), 0.0, best))
    total = tl.sum(rise * tl.load(totals + at, mask=there, other=0.0), 0)
    acc = tl.load(parts + at[:, None] * D_PAD + d[None, :], mask=there[:, None], other=0.0)
    acc = tl.sum(rise[:, None] * acc, 0) / tl.where(total > 0, total, 1.0)
    tl.store(y + (b * heads + head) * D + d, acc.to(y.dtype.element_ty), mask=d < D)


@triton.jit
def _square_relu(x, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    up = tl.maximum(tl.load(x + at, mask=at < count, other=0.0), 0.0)
    tl.store(x + at, up * up, mask=at < count)


def square_relu_(x: Tensor) -> Tensor:
    """relu(x) squared, in place; x is contiguous."""
    run_kernel(_square_relu, (triton.cdiv(x.numel(), 1024),), x, x.numel(), BLOCK=1024, num_warps=4)
    return x


def choose_warps(head_dim: int) -> int:
    """Warps of a program. For heads of 64 dimensions at batch 256 a step took 4% less with one than with two (H200)."""
    return tiles().warps or (1 if head_dim <= 64 else 2)


def triton_step(
    proj: Tensor, hidden: Tensor, form: SpanForm, fields: Fields, column: Tensor, division: Division, *, group: int, fresh: int,
    ramp: float, scale: float, include_self: bool, qk_norm: bool, hidden_eps: float | None = None,
    angles: tuple[Tensor, Tensor] | None = None, relative_keys: Tensor | None = None, normalizer_eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """Append one memory of every row and head, and attend: y [B, Hq * D].

    proj [B, (Hq + 2 Hkv) D]: queries, keys and values before norm and rotation. hidden [B, C]: the hidden states from which spans
    are predicted; with `hidden_eps` they come before their RMS norm, and form.weight must contain the norm's gain.
    column: index of the fresh slot to write, an int32 on the device. angles: rotary cosines and signed sines [fresh, D].
    """
    batch, kv_heads = fields.counts.shape
    dim, width, chosen = fields.k.shape[-1], hidden.shape[1], tiles()
    heads, programs, joins = kv_heads * group, len(division.programs), len(division.joins)
    y = torch.empty(batch, heads * dim, dtype=proj.dtype, device=proj.device)
    padded, cos, sin = power_of_2(dim), *(angles or (fields.pos, fields.pos))
    parts = peaks = totals = fields.pos
    if joins:
        parts = torch.empty(batch, programs, padded, dtype=torch.float32, device=proj.device)
        peaks, totals = (torch.empty(batch, programs, dtype=torch.float32, device=proj.device) for _ in range(2))
    relative = fields.k if relative_keys is None else relative_keys
    run_kernel(
        _step, (batch, programs),
        proj, hidden, *form, cos, sin, relative, *fields, column, division.programs, y, parts, peaks, totals, width,
        fields.k.shape[1], kv_heads, group, proj.stride(0), hidden.stride(0), scale * LOG2E, float(ramp), 1 / ramp,
        torch.finfo(torch.float32).eps, hidden_eps or 0.0, QK_NORM=qk_norm, HIDDEN_NORM=hidden_eps is not None,
        ROTARY=angles is not None, MIN_AGE=0 if include_self else 1,
        WINDOW=0 if relative_keys is None else relative_keys.shape[0], EPS=normalizer_eps, FRESH=fresh, D=dim, D_PAD=padded,
        C_PAD=power_of_2(width), BLOCK_N=chosen.slots, STAGES=chosen.stages, SKIP_DEAD=chosen.skip_dead, APART=chosen.apart,
        num_warps=choose_warps(dim),
    )  # fmt: skip
    if joins:
        sizes = dict(D=dim, D_PAD=padded, MOST=power_of_2(division.most), num_warps=2)
        run_kernel(_join, (batch, joins), parts, peaks, totals, division.joins, y, heads, programs, **sizes)
    return y
