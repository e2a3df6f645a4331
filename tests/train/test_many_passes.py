"""Options for training that reads its data many times: shuffled blocks, and heads' outputs without their own values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from expire_span.models.systems.expire_span.layer import ExpireSpan
from expire_span.ops import expire_attention
from expire_span.tasks.text import ShuffledRows, Text
from tests.error_budget import DOUBLE
from tests.tiny import tiny_config, write_text


def test_every_pass_reads_other_blocks_in_another_order(tmp_path):
    data = np.arange(103).astype(np.uint8)
    rows = ShuffledRows(data, batch=1, block=8, seed=3)
    passes: list[list[int]] = [[] for _ in range(4)]
    while not passes[3]:
        batch = next(rows)
        assert batch.fresh.all() and batch.mask.all() and torch.equal(batch.y, batch.x + 1)
        passes[rows.number] += batch.x[:, 0].tolist()
    for starts in passes[:3]:
        assert len(starts) >= 11 and len({start % 8 for start in starts}) == 1 and len(set(starts)) == len(starts)
        assert starts != sorted(starts)
    assert len({starts[0] % 8 for starts in passes}) > 1
    rows, again = (ShuffledRows(data, batch=5, block=8, seed=3) for _ in range(2))
    for _ in range(7):
        next(rows)
    saved = rows.state_dict()
    again.load_state_dict(saved)
    assert all(torch.equal(next(rows).x, next(again).x) for _ in range(20))
    task = replace(tiny_config(write_text(tmp_path)).task, shuffle=True)
    first, other = (next(Text(task).stream("train", batch=4, block=8, seed=seed)).x for seed in (0, 1))
    assert not torch.equal(first, other)


def test_blocks_are_shuffled_where_the_text_hardly_holds_one():
    rows = ShuffledRows(np.arange(9).astype(np.uint8), batch=1, block=8, seed=0)
    assert [next(rows).x.tolist() for _ in range(3)] == [[list(range(8))]] * 3


def test_outputs_without_own_values_are_orthogonal_to_them():
    torch.manual_seed(0)
    options: dict[str, Any] = dict(max_span=30, ramp=4, initial_span=0.3, positions="none", qk_norm=False)
    layer = ExpireSpan(16, 4, 2, subtract_own=True, **options).double()
    x = torch.randn(2, 23, 16, dtype=torch.float64)
    q, k, v = (layer.split_heads(part(x)) for part in (layer.query, layer.key, layer.value))
    y = expire_attention(q, k, v, layer.span_predictor.by_head(x).squeeze(1), ramp=4)
    own = v.repeat_interleave(2, 1)
    y = y - (y * own).sum(-1, keepdim=True) / own.square().sum(-1, keepdim=True) * own
    assert (y * own).sum(-1).abs().max() < DOUBLE
    want = layer.out(y.transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x)[0], want, rtol=0, atol=10 * DOUBLE)
    assert not layer(x)[0][:, 0].abs().max() > DOUBLE  # the first token sees itself alone
