"""Training: it learns, accumulation changes nothing, rows are reset, rates and optimizers are as asked, NaN stops it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from expire_span import checkpoint
from expire_span.models.decoder import Decoder
from expire_span.settings.run import RecallTask, TrainConfig
from expire_span.tasks.contract import Batch
from expire_span.tasks.registry import build_task
from expire_span.train.evaluate import evaluate, evaluate_stream
from expire_span.train.optimizers import build_optimizers, rate_factor
from expire_span.train.scorer import Scorer
from expire_span.train.supervised import NonFinite, SupervisedLearner, train
from tests.error_budget import reordered
from tests.tiny import noisy_config, tiny_config, write_text

SAME = reordered(256, depth=13)
"""Relative difference of losses whose sums over at most 256 tokens are taken in another order, two layers and a head; 4e-5."""


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


def metrics(run, split="train"):
    return [line for line in run.read_metrics() if line["split"] == split]


def test_learns_and_fills_the_run_folder(tmp_path, text):
    config = tiny_config(text, steps=60, lr=1e-2, eval_every=30)
    run = train(config, str(tmp_path / "a"), recipe="text", shown=False)  # a path may be given as text
    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(2, 61, 2))
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    wanted = {
        "step",
        "split",
        "loss",
        "score",
        "span_loss",
        "span_weight",
        "lr",
        "grad_norm",
        "live",
        "span",
        "bytes_held",
    }
    assert set(lines[0]) == wanted and len(lines[0]["live"]) == config.model.layers
    assert [line["step"] for line in metrics(run, "valid")] == [30, 60]
    assert run.environment["impl"] == "chunked" and run.environment["processes"] == 1
    assert {"tokens_per_second", "seconds", "ms_per_step", "peak_bytes", "step"} == set(run.read_speed()[0])
    assert any((run.path / "tensorboard").iterdir())
    result = run.read_result()
    assert result["step"] == 60 and result["split"] == "test" and math.isfinite(result["loss"])


def test_same_seed_same_metrics(tmp_path, text):
    config = noisy_config(text)
    a, b = (train(config, tmp_path / name, shown=False) for name in "ab")
    assert (a.path / "metrics.jsonl").read_bytes() == (b.path / "metrics.jsonl").read_bytes()
    c = train(replace(config, seed=1), tmp_path / "c", shown=False)
    assert (a.path / "metrics.jsonl").read_bytes() != (c.path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("carry", [True, False])
def test_accumulation_gives_the_whole_batch_result(tmp_path, text, carry):
    config = tiny_config(text, carry=carry, steps=8, log_every=1, span_weight=0.1)
    split = replace(config, train=replace(config.train, accumulate=4))
    a, b = (metrics(train(c, tmp_path / name, shown=False)) for c, name in ((config, "a"), (split, "b")))
    for x, y in zip(a, b):
        assert x["loss"] == pytest.approx(y["loss"], rel=SAME)
        assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=10 * SAME)  # gradients cancel, so less is certain
        assert x["live"] == pytest.approx(y["live"], rel=SAME)


def test_carried_memory_grows_and_block_training_does_not(tmp_path, text):
    config = tiny_config(text, steps=4, log_every=1)
    alone = replace(config, train=replace(config.train, carry=False))
    carried, fresh = (metrics(train(c, tmp_path / n, shown=False)) for c, n in ((config, "a"), (alone, "b")))
    assert carried[-1]["live"][0] > 2 * fresh[-1]["live"][0]
    assert fresh[-1]["live"][0] == pytest.approx((config.train.block + 1) / 2)


def test_loss_counts_only_scored_positions(tmp_path, text):
    config = tiny_config(text, steps=2, log_every=1, block=60, carry=False)
    config = replace(config, task=RecallTask(min_length=5, max_length=50, colours=4))
    run = train(config, tmp_path / "a", shown=False)
    assert 0.5 < metrics(run)[0]["loss"] < 2.5 * math.log(RecallTask().colours * 3)
    assert run.config.model.vocab == build_task(config.task).codec.size


def test_budget_moves_the_weight(tmp_path, text):
    config = tiny_config(text, steps=10, log_every=1)
    budget = replace(config.train.budget, live=2.0, gain=0.3)
    run = train(replace(config, train=replace(config.train, budget=budget)), tmp_path / "a", shown=False)
    weights = [line["span_weight"] for line in metrics(run)]
    assert weights == sorted(weights) and weights[-1] > 3 * weights[0]


def test_bf16_trains(tmp_path, text):
    run = train(tiny_config(text, precision="bf16", steps=4), tmp_path / "a", shown=False)
    assert math.isfinite(metrics(run)[-1]["loss"])


def test_muon_takes_the_matrices_of_blocks_only(text):
    config = tiny_config(text, optimizer="muon")
    decoder = Decoder(config.model)
    adam, muon = build_optimizers(decoder, config.train)
    names = {id(p): name for name, p in decoder.named_parameters()}
    taken = [names[id(p)] for group in muon.param_groups for p in group["params"]]
    assert taken and all(n.startswith("backbone.blocks.") and "span_predictor" not in n for n in taken)
    assert len(names) == len(taken) + sum(len(group["params"]) for group in adam.param_groups)


@pytest.mark.parametrize(("clip", "largest"), [(1e-3, 1e-3), (0.0, math.inf)])
def test_gradients_are_clipped_before_the_update(text, clip, largest):
    """The optimizer sees the clipped norm, the metrics the one before; 0 switches clipping off."""
    learner, seen = SupervisedLearner(tiny_config(text, clip=clip)), []
    grads = lambda: [p.grad for p in learner.parameters if p.grad is not None]  # noqa: E731
    learner.optimizers[0].register_step_pre_hook(lambda *_: seen.append(float(torch.nn.utils.get_total_norm(grads()))))
    learner.step(0)
    before = learner.metrics()["grad_norm"]
    assert before > 1e-2 and seen == [pytest.approx(min(before, largest), rel=1e-3)]


def test_span_predictors_have_their_own_rate_and_only_matrices_decay(text):
    config = tiny_config(text, span_lr_scale=5.0, lr=1e-3, weight_decay=0.1)
    decoder = Decoder(config.model)
    spans = {id(p) for name, p in decoder.named_parameters() if "span_predictor" in name}
    for group in build_optimizers(decoder, config.train)[0].param_groups:
        expected = 5e-3 if id(group["params"][0]) in spans else 1e-3
        assert group["peak"] == pytest.approx(expected)
        assert all((id(p) in spans) == (expected == 5e-3) for p in group["params"])
        assert {p.dim() >= 2 and id(p) not in spans for p in group["params"]} == {group["weight_decay"] == 0.1}


def test_rates():
    cosine = TrainConfig(steps=101, warmup=10, final_lr=0.1)
    assert rate_factor(0, cosine) == pytest.approx(0.1) and rate_factor(9, cosine) == rate_factor(10, cosine) == 1
    assert rate_factor(55, cosine) == pytest.approx(0.55) and rate_factor(100, cosine) == pytest.approx(0.1)
    linear = replace(cosine, schedule="linear", decay_share=0.2, final_lr=0.0)
    assert rate_factor(80, linear) == 1 and rate_factor(100, linear) == pytest.approx(0)
    assert rate_factor(100, replace(cosine, schedule="constant")) == 1


class Poisoned:
    """A task whose model output is spoilt from one step on: its weights become NaN."""

    def __init__(self, learner: SupervisedLearner, step: int) -> None:
        self.inner, self.learner, self.step, self.drawn = learner.stream, learner, step, 0

    def __next__(self):
        self.drawn += 1
        if self.drawn == self.step:
            with torch.no_grad():
                next(self.learner.model.parameters())[ord("e")] = float("nan")
        return next(self.inner)

    def state_dict(self):
        return self.inner.state_dict()


@pytest.mark.parametrize(("log_every", "checkpoint_every"), [(1, 3), (100, 3), (4, 100)])
def test_non_finite_loss_stops_with_step_place_and_advice(tmp_path, text, monkeypatch, log_every, checkpoint_every):
    config = tiny_config(text, steps=20, log_every=log_every, checkpoint_every=checkpoint_every, accumulate=2)
    build = SupervisedLearner._build_budget

    def poisoned(self):
        self.stream = Poisoned(self, 8)
        return build(self)

    monkeypatch.setattr(SupervisedLearner, "_build_budget", poisoned)
    with pytest.raises(NonFinite, match=r"loss became nan at step 8 \(rows 0-1 of that step's batch\).*--train.lr"):
        train(config, tmp_path / "a", shown=False)
    for folder in (tmp_path / "a" / "checkpoints").iterdir():
        assert int(folder.name.split("-")[1]) < 8 and checkpoint.find_fault(folder) is None


def test_evaluation_equals_one_long_pass(tmp_path, text):
    config = tiny_config(text, {"dropout": 0.5})  # which evaluations switch off, and on again
    torch.manual_seed(0)
    decoder, task = Decoder(config.model), build_task(config.task)
    streamed = evaluate(decoder, task, "valid", batch=1, block=7)
    whole = evaluate(decoder, task, "valid", batch=1, block=4096)
    assert streamed.loss == pytest.approx(whole.loss, rel=SAME)
    assert streamed.live == pytest.approx(whole.live, rel=SAME)
    assert streamed.live_share == pytest.approx(whole.live_share, rel=SAME)
    assert streamed.tokens == whole.tokens == len(task.split("valid")) - 1
    assert decoder.training


def test_evaluation_counts_what_lives(tmp_path, text):
    """Spans start at 32 with a ramp of 4: after a while 36 memories and the token itself live, of all that were seen."""
    decoder, task = Decoder(tiny_config(text).model), build_task(tiny_config(text).task)
    result = evaluate(decoder, task, "valid", batch=1, block=50)
    length = result.tokens
    live = sum(min(n + 1, 36) for n in range(length)) / length
    assert result.live == pytest.approx([live] * 2, rel=1e-6)
    assert result.live_share == pytest.approx(live / ((length + 1) / 2), rel=1e-6)
    assert result.peak_bytes < result.full_bytes * 10 and max(result.peak_live) <= 36


def test_rows_that_begin_again_have_seen_nothing(text):
    """All memories of 20 tokens live, so that the share of those seen is 1, also where one row began again half way."""
    config, (x, y) = tiny_config(text), torch.randint(256, (2, 2, 10))
    blocks = [Batch(x, y, torch.ones(2, 10).bool(), torch.tensor(fresh)) for fresh in ((True, True), (True, False))]
    task = build_task(config.task)
    result = evaluate_stream(Scorer(Decoder(config.model), "fp32"), config.model, task, "valid", blocks)
    assert result.live_share == pytest.approx(1) and result.live == pytest.approx([(5.5 + 10.5) / 2] * 2)


def test_result_file_is_plain_json(tmp_path, text):
    run = train(tiny_config(text, steps=2), tmp_path / "a", shown=False)
    assert json.loads((run.path / "result.json").read_text())["tokens"] > 0


def test_evaluations_have_their_own_rows_block_and_length(tmp_path, text):
    """The final score is that of the first `test_batches` batches in the asked shape, and training is untouched."""
    config = tiny_config(text, steps=4, eval_batch=2, eval_block=16, test_batches=3)
    run = train(config, tmp_path / "a", shown=False)
    decoder, _ = checkpoint.load_model(run)
    want = evaluate(decoder, build_task(config.task), "test", batch=2, block=16, batches=3)
    result = run.read_result()
    assert result["tokens"] == want.tokens == 2 * 16 * 3 and result["loss"] == want.loss
    plain = train(tiny_config(text, steps=4), tmp_path / "b", shown=False)
    assert metrics(plain) == metrics(run) and plain.read_result()["tokens"] > result["tokens"]
    with pytest.raises(ValueError, match="test_batches must be at least 1, got 0"):
        TrainConfig(test_batches=0)
