"""Options for training that reads its data many times: the loss of further tokens, shuffled blocks, Muon's two options, and
heads' outputs without their own values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from expire_span.models.decoder import Decoder
from expire_span.models.systems.expire_span.layer import ExpireSpan
from expire_span.ops import expire_attention
from expire_span.tasks.text import ShuffledRows, Text
from expire_span.train.muon import BatchedMuon
from expire_span.train.optimizers import weights_ahead
from expire_span.train.scorer import Scorer
from expire_span.train.supervised import SupervisedLearner
from tests.error_budget import DOUBLE
from tests.tiny import tiny_config, write_text


def test_further_tokens_are_learned_from_the_same_logits(tmp_path):
    """Against a loop; what is not scored is no target, and its own position predicts nothing."""
    scorer = Scorer(Decoder(tiny_config(tmp_path).model).double()).train()
    x, y = torch.randint(0, 256, (2, 3, 11))
    mask = torch.rand(3, 11) < 0.7
    ahead = torch.tensor([0.5, 0.25], dtype=torch.float64)
    plain, _, _ = scorer(x, y, mask, None, None, False)
    sums, _, _ = scorer(x, y, mask, None, None, False, ahead)
    assert "ahead" not in plain and all(torch.equal(plain[name], sums[name]) for name in plain)
    likely = scorer.decoder(x, keep="nothing").logits.float().log_softmax(-1)
    wanted = sum(
        -float(ahead[n - 1] * likely.detach()[row, t, y[row, t + n]])
        for n in (1, 2)
        for row in range(3)
        for t in range(11 - n)
        if mask[row, t] and mask[row, t + n]
    )
    assert float(sums["ahead"].detach()) == pytest.approx(wanted, rel=1e-5)


def test_the_loss_of_further_tokens_trains_falls_and_does_not_count(tmp_path, monkeypatch):
    config, given = tiny_config(write_text(tmp_path), steps=7, ahead=(0.8,)), []
    learner, plain = (
        SupervisedLearner(config),
        SupervisedLearner(replace(config, train=replace(config.train, ahead=()))),
    )
    real = learner.run_pass
    monkeypatch.setattr(learner, "run_pass", lambda one: given.append(float(one.ahead)) or real(one))
    for one in (learner, plain):
        one.step(0)
    assert learner.metrics()["loss"] == plain.metrics()["loss"]
    assert not torch.equal(learner.trained.head.weight, plain.trained.head.weight)
    for index in range(1, 7):
        learner.step(index)
    assert given == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0, 0.0, 0.0])
    assert weights_ahead((0.5, 0.25), 1 / 3) == pytest.approx([0.25, 0.125])


def test_what_further_tokens_cannot_be_learned_with_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"ahead must hold weights of 0 or more, got \(0\.5, -1\.0\)"):
        tiny_config(tmp_path, ahead=(0.5, -1.0))
    with pytest.raises(ValueError, match="ahead needs blocks that are read whole, got context_parallel 1 and pieces 2"):
        tiny_config(tmp_path, ahead=(0.5,), pieces=2, carry=False)
    with pytest.raises(ValueError, match=r"row_norm must lie in \[0, 1\), got 1"):
        tiny_config(tmp_path, row_norm=1.0)


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


def muon_step(start: torch.Tensor, grads: list[torch.Tensor], **options: Any) -> tuple[torch.Tensor, BatchedMuon]:
    p = torch.nn.Parameter(start.clone())
    muon = BatchedMuon([p], lr=0.1, **options)
    for grad in grads:
        p.grad = grad.clone()
        muon.step()
    return p.detach(), muon


def test_cautious_decay_acts_where_the_update_shrinks_the_weight():
    torch.manual_seed(0)
    start, grad = torch.randn(2, 8, 12)
    still, _ = muon_step(start, [grad], weight_decay=0.0)
    decayed, _ = muon_step(start, [grad], weight_decay=0.5)
    cautious, _ = muon_step(start, [grad], weight_decay=0.5, cautious=True)
    shrinks = (still - start) * start < 0
    assert 0 < int(shrinks.sum()) < start.numel()
    torch.testing.assert_close(cautious, torch.where(shrinks, decayed, still))


def test_rows_of_an_update_are_brought_to_equal_size():
    torch.manual_seed(0)
    start, grads = torch.zeros(12, 8), list(torch.randn(3, 12, 8))  # tall, so orthogonalised rows differ in size
    plain, _ = muon_step(start, grads[:1])
    even, muon = muon_step(start, grads[:1], row_norm=0.9)
    sizes = plain.norm(dim=1)
    assert sizes.max() > 1.2 * sizes.min()
    torch.testing.assert_close(even.norm(dim=1), even.norm(dim=1)[:1].expand(12))
    torch.testing.assert_close(even.norm(), plain.norm())
    torch.testing.assert_close(F.normalize(even, dim=1), F.normalize(plain, dim=1))
    (state,) = muon.state.values()
    update = plain / plain.norm(dim=1, keepdim=True) * sizes[:, None]
    ratio = state["row_squares"][:, 0] / update.square().mean(1)
    torch.testing.assert_close(ratio, ratio[:1].expand(12))
    other, _ = muon_step(start, grads, row_norm=0.9)
    assert not torch.allclose(other.norm(dim=1), other.norm(dim=1)[:1].expand(12), rtol=1e-3)


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
