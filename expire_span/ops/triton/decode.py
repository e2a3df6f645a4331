"""Decoding: a few queries per row over a compacted store, read in place, without gradients.

The memories of a row are split over several programs, so that one long row keeps the whole GPU busy. Each program writes a
partial softmax, and a second kernel combines them. All queries of all query heads of one key/value head form one tile, so that
every living memory is read once; keys and values of dead ones and of padding are not read at all.

Rows of unequal length may be stored one after the other in flat buffers (`Segments` of the store): each program then begins at
its row's first slot and ends with its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import LOG2E, find_entries, relative_table, squash
from .launch import run_kernel
from .layout import FAR, num_heads, power_of_2, strides
from .rule import fade, inverse, is_alive, tanh
from .tuning import dot_precision


@triton.jit
def _decode(
    q, k, v, span, q_pos, k_pos, table, starts, counts,  # read: queries, memories, scores of distances, where rows lie
    parts, peaks, totals,  # written
    T, S, added, kv_heads, group, per_split, heads,  # sizes
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, sp_b, sp_h, sp_s, kp_b, kp_h, kp_s, qp_b,  # strides
    scale, ramp, inv_ramp,
    MIN_AGE: tl.constexpr, WINDOW: tl.constexpr, EPS: tl.constexpr, SQUASH: tl.constexpr, D: tl.constexpr,
    D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """One program: all queries of one key/value head over `per_split` of its memories. Writes the values summed by weight, the
    largest score and the sum of weights, which `_join` combines."""
    split, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // kv_heads, bh % kv_heads
    row_head = h % heads
    r = tl.arange(0, BLOCK_M)  # row g * T + t of the tile is query t of the group's query head g
    d = tl.arange(0, D_PAD)
    inside = r < group * T
    q_at = q + b * q_b + (h * group + r // T)[:, None] * q_h + (r % T)[:, None].to(tl.int64) * q_t + d[None, :]
    q_tile = tl.load(q_at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    t0 = tl.load(q_pos + b * qp_b)
    since = (tl.load(q_pos + b * qp_b + r % T, mask=inside, other=0) - t0).to(tl.int32)
    last = tl.max(since, 0)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    begin = split * per_split
    first, end = 0, S
    if SEGMENTS:
        first = tl.load(starts + b * heads + row_head)
        end = (tl.load(counts + b * heads + row_head) + added).to(tl.int32)
    for start in range(begin, tl.minimum(begin + per_split, end), BLOCK_N):
        i = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        held = i < end
        i += first
        born = tl.load(k_pos + b * kp_b + row_head * kp_h + i * kp_s, mask=held, other=0)
        born = tl.minimum(tl.maximum(born - t0, -FAR), FAR).to(tl.int32)
        length = tl.load(span + b * sp_b + row_head * sp_h + i * sp_s, mask=held, other=0.0).to(tl.float32)
        wanted = held & is_alive(length + born.to(tl.float32), ramp) & (born <= last - MIN_AGE)
        read = wanted[:, None] & (d[None, :] < D)
        rows = tl.load(k + b * k_b + h * k_h + i[:, None] * k_s + d[None, :], mask=read, other=0.0)
        s = tl.dot(q_tile, tl.trans(rows), input_precision=PRECISION) * scale
        age = since[:, None] - born[None, :]
        m = fade(length[None, :] - age.to(tl.float32), inv_ramp)
        alive = (m > 0) & wanted[None, :] & (age >= MIN_AGE)
        if WINDOW > 0:
            at, near = find_entries(r, 1, since, born, WINDOW)
            bias = tl.load(table + bh * group * T * WINDOW + at, mask=near & inside[None, :], other=0.0)
            s += tl.trans(bias).to(tl.float32) * scale
        if SQUASH != 0:  # `scale` is that under the tangent
            s = tanh(s) * SQUASH
        s = tl.where(alive, s, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        e = tl.math.exp2(s - safe[:, None])
        p = m * e  # where not alive, e is 0
        decay = tl.math.exp2(peak - safe)
        total = total * decay + tl.sum(p, 1)
        if EPS != 0:
            total += EPS * tl.sum(e, 1)
        rows = tl.load(v + b * v_b + h * v_h + i[:, None] * v_s + d[None, :], mask=read, other=0.0)
        acc = tl.dot(p.to(rows.dtype), rows, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
    out = (bh * tl.num_programs(0) + split) * BLOCK_M + r
    tl.store(parts + out[:, None] * D_PAD + d[None, :], acc)
    tl.store(peaks + out, peak)
    tl.store(totals + out, total)


@triton.jit
def _join(
    parts, peaks, totals, sinks, y, T, kv_heads, group, splits, SINKS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The output of one query from the parts that the programs of `_decode` computed, and its head's sink."""
    bh, r = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D_PAD)
    acc = tl.zeros([D_PAD], tl.float32)
    total = 0.0
    peak = float("-inf")
    if SINKS:
        peak = tl.load(sinks + bh % kv_heads * group + r // T)
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    for split in range(splits):
        at = (bh * splits + split) * BLOCK_M + r
        part_peak = tl.load(peaks + at)
        new_peak = tl.maximum(peak, part_peak)
        safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay, rise = tl.math.exp2(peak - safe), tl.math.exp2(part_peak - safe)
        acc = acc * decay + tl.load(parts + at * D_PAD + d) * rise
        total = total * decay + tl.load(totals + at) * rise
        peak = new_peak
    acc = acc / tl.where(total > 0, total, 1.0)
    out = ((bh * group + r // T) * T + r % T) * D + d
    tl.store(y + out, acc.to(y.dtype.element_ty), mask=d < D)


def triton_decode(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, q_pos: Tensor, k_pos: Tensor, *, ramp: float, include_self: bool,
    scale: float, relative_keys: Tensor | None = None, normalizer_eps: float = 0.0, softcap: float = 0.0,
    sinks: Tensor | None = None, segments: tuple[Tensor, Tensor, int, int] | None = None,
) -> Tensor:  # fmt: skip
    """y [B, Hq, T, D] for few queries; inputs as in `triton_attention`, any strides, no gradients.

    segments: (first slot of each row [B * (1 or Hkv)], number of memories of each row, number of memories added to every row since
    they were counted, memories of the longest row); k, v, span and k_pos are then views of flat buffers that all rows share.
    """
    batch, q_heads, queries, dim = q.shape
    kv_heads, memories = k.shape[1:3]
    starts, counts, added, memories = segments or (q_pos, q_pos, 0, memories)
    if queries == 0 or memories == 0:
        return torch.zeros_like(q)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q_pos = q_pos if q_pos.stride(-1) == 1 else q_pos.contiguous()
    group, table = q_heads // kv_heads, relative_table(q, relative_keys)
    table = table if table is None else table.transpose(1, 2).contiguous()  # [B, Hq, T, M], the order of a tile's rows
    block_m, padded = max(16, power_of_2(group * queries)), power_of_2(dim)
    block_n = 64 if padded <= 128 and q.element_size() < 4 else 32
    heads = num_heads(span, k_pos) if segments is None else len(starts) // batch
    per_split, splits = _split(memories, batch * kv_heads, block_n)
    like = dict(dtype=torch.float32, device=q.device)
    parts = torch.empty(batch * kv_heads, splits, block_m, padded, **like)
    peaks, totals = (torch.empty(batch * kv_heads, splits, block_m, **like) for _ in range(2))
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    run_kernel(
        _decode, (splits, batch * kv_heads),
        q, k, v, span, q_pos, k_pos, parts if table is None else table, starts, counts, parts, peaks, totals, queries,
        memories, added, kv_heads, group, per_split, heads, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *strides(span),
        *strides(k_pos), strides(q_pos)[0], squash(scale, softcap) or scale * LOG2E, ramp, inverse(ramp), MIN_AGE=0 if include_self else 1,
        WINDOW=0 if table is None else table.shape[-1], EPS=normalizer_eps, SQUASH=softcap * LOG2E, D=dim,
        D_PAD=padded, BLOCK_M=block_m, BLOCK_N=block_n, PRECISION=dot_precision(q.dtype), SEGMENTS=segments is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    run_kernel(
        _join, (batch * kv_heads, group * queries), parts, peaks, totals, peaks if sinks is None else sinks.float() * LOG2E, y,
        queries, kv_heads, group, splits, SINKS=sinks is not None, D=dim, D_PAD=padded, BLOCK_M=block_m, num_warps=1,
    )  # fmt: skip
    return y


def _split(memories: int, rows: int, block_n: int) -> tuple[int, int]:
    """Memories per program and programs per row: about two programs per multiprocessor, with a few tiles each."""
    wanted = max(1, 264 // rows)
    per_split = -(-memories // (wanted * 4 * block_n)) * 4 * block_n
    return per_split, -(-memories // per_split)
