"""One token of each of several requests over slots in blocks (vllm/slots.py), as one kernel.

A program has one key/value head of one request: it reads the slots of the head in the request's block, attends to what is alive,
to the new memory too, and then puts the new memory into the first slot that is free for the next query. Nobody else reads or
writes these slots, and which block and position a request has are numbers on the device, so the host waits for nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .forward import LOG2E
from .launch import run_kernel
from .layout import power_of_2
from .rule import fade, inverse, is_alive

BLOCK_N = 32
"""Slots that a program reads at once."""
NOWHERE = tl.constexpr(2**30)
"""Index beyond all slots."""


@triton.jit
def _attend(acc, total, peak, q, keys, values, m, scale):
    """Add memories of weights m [N] to the sums of the queries [G]."""
    s = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    s = tl.where(m[None, :] > 0, s, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(s, 1))
    safe = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = m[None, :] * tl.math.exp2(s - safe[:, None])
    decay = tl.math.exp2(peak - safe)
    acc = acc * decay[:, None] + tl.dot(p, values, input_precision="ieee")
    return acc, total * decay + tl.sum(p, 1), new_peak


@triton.jit
def _weaker(left, pos, i, alive, least, oldest, where):
    """Among the living and the weakest so far: the fewest steps left, of equals the oldest, and its slot."""
    tile_left = tl.min(tl.where(alive, left, float("inf")), 0)
    tied = alive & (left == tile_left)
    tile_pos = tl.min(tl.where(tied, pos, NOWHERE), 0)
    tile_slot = tl.min(tl.where(tied & (pos == tile_pos), i, NOWHERE), 0)
    is_weaker = (tile_left < least) | ((tile_left == least) & (tile_pos < oldest))
    return (
        tl.where(is_weaker, tile_left, least),
        tl.where(is_weaker, tile_pos, oldest),
        tl.where(is_weaker, tile_slot, where),
    )


@triton.jit
def _step(
    q, k, v, new_span, blocks, now,  # read: the new tokens, [n, ..]
    k_of, v_of, span_of, pos_of, bounds,  # read and written: the layer's slots; where its heads' slots begin
    y, lost,  # written
    kv_heads, group, k_b, v_b, span_b, pos_b,  # sizes, and strides from block to block
    scale, inv_ramp, ramp,
    EVICT: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, G_PAD: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    block, t = tl.load(blocks + row), tl.load(now + row)
    first, end = tl.load(bounds + h), tl.load(bounds + h + 1)
    keys_of, values_of = k_of + block * k_b, v_of + block * v_b
    spans_of, births_of = span_of + block * span_b, pos_of + block * pos_b
    d, g, n = tl.arange(0, D_PAD), tl.arange(0, G_PAD), tl.arange(0, N)
    inside = d < D
    queries = (row * kv_heads + h) * group * D + g[:, None] * D + d[None, :]
    mine = (g < group)[:, None] & inside[None, :]
    query = tl.load(q + queries, mask=mine, other=0.0).to(tl.float32)
    acc, total = tl.zeros([G_PAD, D_PAD], tl.float32), tl.zeros([G_PAD], tl.float32)
    peak = tl.full([G_PAD], float("-inf"), tl.float32)
    free, weakest, least, oldest = NOWHERE, NOWHERE, float("inf"), NOWHERE
    for start in range(first, end, N):
        i = start + n
        held = i < end
        span = tl.load(spans_of + i, mask=held, other=float("-inf"))
        pos = tl.load(births_of + i, mask=held, other=0)
        m = fade(span - (t - pos).to(tl.float32), inv_ramp)
        at, read = i[:, None].to(tl.int64) * D + d[None, :], (m > 0)[:, None] & inside[None, :]
        keys = tl.load(keys_of + at, mask=read, other=0.0).to(tl.float32)
        values = tl.load(values_of + at, mask=read, other=0.0).to(tl.float32)
        acc, total, peak = _attend(acc, total, peak, query, keys, values, m, scale)
        left = span - (t + 1 - pos).to(tl.float32)
        stays = is_alive(left, ramp)
        free = tl.minimum(free, tl.min(tl.where(held & (stays == 0), i, NOWHERE), 0))
        if EVICT:
            least, oldest, weakest = _weaker(left, pos, i, held & stays, least, oldest, weakest)
    # The new memory, as a tile with one that is read.
    new = (row * kv_heads + h) * D + d
    span = tl.load(new_span + row * kv_heads + h)
    key, value = tl.load(k + new, mask=inside, other=0.0), tl.load(v + new, mask=inside, other=0.0)
    only = n == 0
    keys = tl.where(only[:, None], key.to(k_of.dtype.element_ty).to(tl.float32)[None, :], 0.0)
    values = tl.where(only[:, None], value.to(v_of.dtype.element_ty).to(tl.float32)[None, :], 0.0)
    m = tl.where(only, fade(span, inv_ramp), 0.0)
    acc, total, peak = _attend(acc, total, peak, query, keys, values, m, scale)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(y + queries, out.to(y.dtype.element_ty), mask=mine)
    tl.debug_barrier()  # all threads have read the slots before one of them is written
    if is_alive(span - 1.0, ramp):
        target = free
        if free == NOWHERE:
            tl.atomic_add(lost + row, 1)
            if EVICT:
                target = tl.where(span - 1.0 < least, NOWHERE, weakest)
        if target < NOWHERE:
            at = target.to(tl.int64) * D + d
            tl.store(keys_of + at, key.to(k_of.dtype.element_ty), mask=inside)
            tl.store(values_of + at, value.to(v_of.dtype.element_ty), mask=inside)
            tl.store(spans_of + target, span)
            tl.store(births_of + target, t.to(tl.int32))


def triton_block_step(
    q: Tensor, k: Tensor, v: Tensor, span: Tensor, blocks: Tensor, now: Tensor, fields: tuple[Tensor, ...], bounds: Tensor, *,
    ramp: float, scale: float, evict: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [n, Hq, D], k, v [n, Hkv, D], span [n, Hkv] in float32, blocks and now [n] in int64; fields: those of `BlockSlots`. Returns
    y [n, Hq, D] and the number of memories of each request that found no slot, [n]."""
    count, heads, dim = k.shape
    q, k, v, span, blocks, now = (x.contiguous() for x in (q, k, v, span, blocks, now))
    y, lost = q.new_empty(q.shape), blocks.new_zeros(count)
    if not count:
        return y, lost
    group = q.shape[1] // heads
    keys, values, spans, births = fields
    run_kernel(
        _step, (count, heads),
        q, k, v, span, blocks, now, keys, values, spans, births, bounds, y, lost,
        heads, group, keys.stride(0), values.stride(0), spans.stride(0), births.stride(0), scale * LOG2E, inverse(ramp), ramp,
        EVICT=evict, D=dim, D_PAD=max(16, power_of_2(dim)), G_PAD=max(16, power_of_2(group)), N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return y, lost
