"""One decoding step over slots (store/slots.py) as one kernel: from projections to the attention's output.

The first program of a query head of a row normalises and rotates the query and the new key, predicts the new memory's span,
appends it to the fresh slots, and attends to what lives. How many slots there are to read, and which fresh slot is next, are
numbers on the device, so that a launch recorded in a CUDA graph stays valid while they change. Further programs of the same head
share its tiles of slots (slot_tiles.py says how many there are), and the last of them to finish adds their partial sums, always in
the same order.

The slot that is written is never read in the same launch: programs compute the new memory from its projections.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from expire_span.ops.slots import SpanForm

from .forward import LOG2E, squash
from .launch import run_kernel
from .layout import power_of_2
from .rule import fade, inverse, tanh
from .slot_tiles import Division, tiles


class Fields(NamedTuple):
    """The buffers of slots, as `Slots` names them."""

    k: Tensor
    v: Tensor
    pos: Tensor
    span: Tensor
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
def _look_at(tile, written, now, end, pos_of, span_of, FRESH: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots of a tile, the age of their memories, and the steps that these remain: minus infinity in empty slots."""
    is_older = tile >= written
    i = tl.where(is_older, FRESH + (tile - written) * BLOCK_N, tile * BLOCK_N) + tl.arange(0, BLOCK_N)
    held = i < tl.where(is_older, end, now)
    age = now.to(tl.float32) - tl.load(pos_of + i, mask=held, other=0.0)
    return i, age, tl.load(span_of + i, mask=held, other=float("-inf")) - age


@triton.jit
def _score(s, scale, SQUASH: tl.constexpr):
    """Scores in base 2 of products q . k; with soft caps, SQUASH is the factor under the tangent and `scale` the cap."""
    if SQUASH != 0:
        s = tanh(s * SQUASH)
    return s * scale


@triton.jit
def _attend_tile(
    acc, total, peak, q, keys_of, values_of, relative, i, age, m, read, scale, d, inside,
    WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Add the memories of one tile of slots to the sums of a query. read: slots whose keys and values are loaded."""
    alive = m > 0
    at, read = i[:, None] * D + d[None, :], read[:, None] & inside[None, :]
    keys = tl.load(keys_of + at, mask=read, other=0.0).to(tl.float32)
    values = tl.load(values_of + at, mask=read, other=0.0).to(tl.float32)
    if WINDOW > 0:
        near = alive & (age >= 1) & (age <= WINDOW)
        far = (age - 1).to(tl.int32)[:, None] * D + d[None, :]
        keys += tl.load(relative + far, mask=near[:, None] & inside[None, :], other=0.0).to(tl.float32)
    s = tl.where(alive, _score(tl.sum(keys * q[None, :], 1), scale, SQUASH), float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 0))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    e = tl.math.exp2(s - safe)
    p = m * e  # where dead, e is 0
    decay = tl.math.exp2(peak - safe)
    return acc * decay + tl.sum(p[:, None] * values, 0), total * decay + tl.sum(p + EPS * e, 0), new_peak


@triton.jit
def _attend_tiles(
    sinks, head, q, keys_of, values_of, pos_of, span_of, relative, now, end, first, step, scale, inv_ramp, d, inside,
    WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr, SINKS: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SKIP_DEAD: tl.constexpr,
):  # fmt: skip
    """Attend from one query to every `step`-th tile of its head's slots: values summed by weight [D_PAD], the weights' sum, and
    the largest score. A head's first program begins with the head's sink. The tiles are those of the fresh slots before `now`, which have been written since the last compaction, and
    those of the older slots before `end`."""
    acc, total, peak = tl.zeros([D_PAD], tl.float32), 0.0, float("-inf")
    if SINKS:
        peak = tl.where(first == 0, tl.load(sinks + head), float("-inf"))
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    written = tl.cdiv(now, BLOCK_N)
    tiles = written + tl.cdiv(end - FRESH, BLOCK_N)
    if SKIP_DEAD:
        # Which memories of a tile are alive is read while the tile before it is attended to.
        i, age, remaining = _look_at(first, written, now, end, pos_of, span_of, FRESH, BLOCK_N)
        for tile in tl.range(first, tiles, step, num_stages=STAGES):
            next_i, next_age, next_remaining = _look_at(tile + step, written, now, end, pos_of, span_of, FRESH, BLOCK_N)
            if fade(tl.max(remaining, 0), inv_ramp) > 0:  # one weight in place of a tile's, most of which are skipped
                m = fade(remaining, inv_ramp)
                acc, total, peak = _attend_tile(
                    acc, total, peak, q, keys_of, values_of, relative, i, age, m, m > 0, scale, d, inside,
                    WINDOW, EPS, SQUASH, D,
                )  # fmt: skip
            i, age, remaining = next_i, next_age, next_remaining
    else:
        for tile in tl.range(first, tiles, step, num_stages=STAGES):
            i, age, remaining = _look_at(tile, written, now, end, pos_of, span_of, FRESH, BLOCK_N)
            held = i < tl.where(tile >= written, end, now)
            acc, total, peak = _attend_tile(
                acc, total, peak, q, keys_of, values_of, relative, i, age, fade(remaining, inv_ramp), held, scale, d, inside,
                WINDOW, EPS, SQUASH, D,
            )  # fmt: skip
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
def _attend_self(acc, total, peak, q, k_new, v_new, m, scale, EPS: tl.constexpr, SQUASH: tl.constexpr):
    """Add the new memory, of weight m, to the sums of its own query."""
    s = tl.where(m > 0, _score(tl.sum(k_new * q, 0), scale, SQUASH), float("-inf"))
    new_peak = tl.maximum(peak, s)
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    e, decay = tl.math.exp2(s - safe), tl.math.exp2(peak - safe)
    p = m * e
    return acc * decay + p * v_new, total * decay + p + EPS * e, new_peak


@triton.jit
def _write(y, acc, total, proj, gate_bias, head, d, inside, GATES: tl.constexpr):
    """Write a head's output, the weighted sum over the sum of weights, times its gate where the layer has gates."""
    acc = acc / tl.where(total > 0, total, 1.0)
    if GATES > 0:
        logit = tl.load(proj + GATES + head).to(tl.float32) + tl.load(gate_bias + head)
        acc = acc * (2.0 / (1.0 + tl.exp(-logit)))
    tl.store(y + d, acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _join(parts, peaks, totals, count, d, D_PAD: tl.constexpr, MOST: tl.constexpr, AT_ONCE: tl.constexpr):
    """Add the partial sums of the `count` programs of one head: values summed by weight [D_PAD], and the weights' sum."""
    n = tl.arange(0, MOST)
    # Programs on other multiprocessors wrote these, so they must not come from this one's own cache.
    peak = tl.load(peaks + n, mask=n < count, other=float("-inf"), cache_modifier=".cg")
    best = tl.max(peak, 0)
    best = tl.where(best == float("-inf"), 0.0, best)
    part = tl.load(totals + n, mask=n < count, other=0.0, cache_modifier=".cg")
    total = tl.sum(tl.math.exp2(peak - best) * part, 0)
    acc = tl.zeros([D_PAD], tl.float32)
    for start in range(0, count, AT_ONCE):
        i = start + tl.arange(0, AT_ONCE)
        peak_i = tl.load(peaks + i, mask=i < count, other=float("-inf"), cache_modifier=".cg")
        at = i[:, None] * D_PAD + d[None, :]
        sums = tl.load(parts + at, mask=(i < count)[:, None], other=0.0, cache_modifier=".cg")
        acc += tl.sum(tl.math.exp2(peak_i - best)[:, None] * sums, 0)
    return acc, total


@triton.jit
def _step(
    proj, hidden, weight, bias, low, room, gate_bias, cos, sin, relative,  # read: q, k, v, gates, the span's predictor, positions
    sinks,  # read: one logit of each query head
    k, v, pos, span,  # read and written: the slots
    counts, bounds, column, programs,  # read: how full and where the heads' slots are, the time, the division of the work
    y, parts, peaks, totals, finished,  # written
    width, slots, kv_heads, group, proj_b, hidden_b,  # sizes and strides
    scale, inv_ramp, norm_eps, hidden_eps,
    QK_NORM: tl.constexpr, HIDDEN_NORM: tl.constexpr, ROTARY: tl.constexpr, MIN_AGE: tl.constexpr, WINDOW: tl.constexpr,
    EPS: tl.constexpr, SQUASH: tl.constexpr, SINKS: tl.constexpr, GATES: tl.constexpr, FRESH: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, C_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, SKIP_DEAD: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program: some tiles of one query head of one row. The head's first program also appends the new memory; the last one to
    finish adds the sums of all."""
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
    cos_of, sin_of = cos + b * FRESH * D, sin + b * FRESH * D
    # Addresses are those of the head's first slot plus 32-bit offsets: half the registers of 64-bit ones.
    base = b * slots + tl.load(bounds + h)
    keys_of, values_of, pos_of, span_of = k + base * D, v + base * D, pos + base, span + base
    end = FRESH + tl.load(counts + b * kv_heads + h)
    q = _place(mine + head * D, cos_of, sin_of, now, d, inside, norm_eps, D, QK_NORM, ROTARY)
    # The new memory is computed before the slots are read, so that its loads and theirs are under way together.
    k_new, v_new, m_new = tl.zeros([D_PAD], tl.float32), tl.zeros([D_PAD], tl.float32), 0.0
    if first == 0:
        k_new = _place(mine + (heads + h) * D, cos_of, sin_of, now, d, inside, norm_eps, D, QK_NORM, ROTARY)
        v_new = tl.load(mine + (heads + kv_heads + h) * D + d, mask=inside, other=0.0).to(tl.float32)
        state = hidden + b * hidden_b
        new_span = _predict_span(state, weight, bias, low, room, h, c, width, hidden_eps, HIDDEN_NORM)
        m_new = fade(new_span, inv_ramp)
        if head % group == 0:
            at = now * D + d
            tl.store(keys_of + at, k_new.to(k.dtype.element_ty), mask=inside)
            tl.store(values_of + at, v_new.to(v.dtype.element_ty), mask=inside)
            tl.store(span_of + now, new_span)
    acc, total, peak = _attend_tiles(
        sinks, head, q, keys_of, values_of, pos_of, span_of, relative, now, end, first, step, scale, inv_ramp, d, inside,
        WINDOW, EPS, SQUASH, SINKS, FRESH, D, D_PAD, BLOCK_N, STAGES, SKIP_DEAD,
    )  # fmt: skip
    if first == 0 and MIN_AGE == 0:
        acc, total, peak = _attend_self(acc, total, peak, q, k_new, v_new, m_new, scale, EPS, SQUASH)
    out = y + (b * heads + head) * D
    if step == 1:
        _write(out, acc, total, mine, gate_bias, head, d, inside, GATES)
    else:
        start = b * tl.num_programs(1) + program - first  # of this head's first program
        tl.store(parts + (start + first) * D_PAD + d, acc)
        tl.store(peaks + start + first, peak)
        tl.store(totals + start + first, total)
        tl.debug_barrier()  # all threads have stored before one of them reports it
        before = tl.atomic_add(finished + b * heads + head, 1, sem="acq_rel")
        if before == step - 1:
            acc, total = _join(parts + start * D_PAD, peaks + start, totals + start, step, d, D_PAD, MOST, 8)
            _write(out, acc, total, mine, gate_bias, head, d, inside, GATES)
            tl.store(finished + b * heads + head, 0)  # for the next step


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
    gate_bias: Tensor | None = None, softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append one memory of every row and head, and attend: y [B, Hq * D].

    proj [B, (Hq + 2 Hkv) D]: queries, keys and values before norm and rotation; with gate_bias [Hq], followed by the logits of the
    heads' gates without their bias. hidden [B, C]: the hidden states from which spans are predicted; with `hidden_eps` they come
    before their RMS norm, and form.weight must contain the norm's gain.
    column: index of the fresh slot to write, an int32 on the device. angles: rotary cosines and signed sines
    [B, fresh, D]. sinks [Hq]: with softcap, those of `expire_attention`.
    """
    batch, kv_heads = fields.counts.shape
    dim, width, chosen = fields.k.shape[-1], hidden.shape[1], tiles()
    heads, programs = kv_heads * group, len(division.programs)
    y = torch.empty(batch, heads * dim, dtype=proj.dtype, device=proj.device)
    padded, cos, sin = power_of_2(dim), *(angles or (fields.pos, fields.pos))
    parts = peaks = totals = fields.pos
    if division.most > 1:
        parts = torch.empty(batch, programs, padded, dtype=torch.float32, device=proj.device)
        peaks, totals = (torch.empty(batch, programs, dtype=torch.float32, device=proj.device) for _ in range(2))
    relative, gates = fields.k if relative_keys is None else relative_keys, (heads + 2 * kv_heads) * dim
    run_kernel(
        _step, (batch, programs),
        proj, hidden, *form, fields.pos if gate_bias is None else gate_bias, cos, sin, relative,
        fields.pos if sinks is None else sinks.float() * LOG2E, *fields, column,
        division.programs, y, parts, peaks, totals, division.finished, width,
        fields.k.shape[1], kv_heads, group, proj.stride(0), hidden.stride(0), (softcap or scale) * LOG2E, inverse(ramp),
        torch.finfo(torch.float32).eps, hidden_eps or 0.0, QK_NORM=qk_norm, HIDDEN_NORM=hidden_eps is not None,
        ROTARY=angles is not None, MIN_AGE=0 if include_self else 1,
        WINDOW=0 if relative_keys is None else relative_keys.shape[0], EPS=normalizer_eps,
        SQUASH=squash(scale, softcap), SINKS=sinks is not None, GATES=0 if gate_bias is None else gates, FRESH=fresh, D=dim, D_PAD=padded, C_PAD=power_of_2(width), BLOCK_N=chosen.slots,
        STAGES=chosen.stages, SKIP_DEAD=chosen.skip_dead, MOST=power_of_2(division.most),
        num_warps=choose_warps(dim),
    )  # fmt: skip
    return y
