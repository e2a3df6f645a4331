"""The two questions: encoders whose tokens expire, and ordinary attention with a penalty and a cache that drops."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from expire_span.cli import main
from expire_span.lab.study.page import write_page
from expire_span.lab.study.questions import cells, study
from expire_span.lab.study.questions.cells import CacheCell, EncoderCell, asked_on_side, learned_spans, small_model
from expire_span.lab.study.questions.fit import fit, measure
from expire_span.lab.study.questions.labelling import Labelling, LabellingTask
from expire_span.lab.study.questions.page import percent
from expire_span.lab.study.questions.penalty import PENALTIES, Drop, drop_unread, penalise
from expire_span.lab.study.questions.study import (
    QuestionsSettings,
    best_within,
    is_quick,
    penalty_gradients,
    run_study,
    spread,
    summarise,
)
from expire_span.models.decoder import Decoder
from expire_span.models.encoder import Encoder
from expire_span.models.lifetimes import live_both_ways
from expire_span.models.systems.full import FullConfig
from expire_span.models.systems.transformer_xl import TransformerXLConfig
from expire_span.settings.run import BudgetConfig, TrainConfig
from tests.error_budget import DOUBLE

LENGTH = 40
TOKENS = torch.randint(30, (2, LENGTH), generator=torch.Generator().manual_seed(3))


def encoder(mixer, layers: int = 2, positions: str = "rotary") -> Decoder:
    torch.manual_seed(0)
    return Encoder(replace(small_model(30, layers, positions, mixer), dim=16, heads=2, ff_dim=16)).double().eval()


def varied(model: Decoder, limit: float = 0.0) -> Decoder:
    """Spans that differ from token to token."""
    with torch.no_grad():
        for block in model.layers():
            block.mixer.span_predictor.weight.normal_(generator=torch.Generator().manual_seed(1))
            block.mixer.span_predictor.bias.fill_(limit)
    return model


def dense_both_ways(mixer, x):
    """Attention of one layer as the formula says it, pair by pair in float64, and its mask."""
    q, k, v, _ = mixer.project(x, 0)
    span = mixer.span_predictor(x).squeeze(1)
    place = torch.arange(x.shape[1])
    distance = (place[:, None] - place).abs()
    mask = (1 + (span[:, None, :] - distance) / mixer.span_predictor.ramp).clamp(0, 1)
    weight = mask[:, None] * torch.exp(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5)
    return mixer.join_heads(weight / weight.sum(-1, keepdim=True) @ v), mask


# (a) Encoders


def test_spans_reach_both_ways_as_the_formula_says():
    """Outputs and every gradient, the span predictor's among them."""
    mixer = varied(encoder(replace(learned_spans(60), ramp=5), layers=1), -2.0).layers()[0].mixer
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    direction = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    dense, mask = dense_both_ways(mixer, x)
    assert 0.2 < (mask == 0).double().mean() < 0.9 and ((mask > 0) & (mask < 1)).any()
    got = mixer(x, mixer.initial_state(2, keep="nothing")).y
    assert torch.allclose(got, dense, atol=DOUBLE)
    inputs = [x, *mixer.parameters()]
    for a, b in zip(torch.autograd.grad(got, inputs, direction), torch.autograd.grad(dense, inputs, direction)):
        assert torch.allclose(a, b, atol=DOUBLE)
    assert (
        float(torch.autograd.grad(dense_both_ways(mixer, x)[0], mixer.span_predictor.bias, direction)[0].abs()) > 1e-3
    )


def test_living_tokens_are_counted_on_both_sides():
    mixer = varied(encoder(replace(learned_spans(60), ramp=5), layers=1)).layers()[0].mixer
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    mask = dense_both_ways(mixer, x)[1]
    span = mixer.span_predictor(x).squeeze(1)
    alive = live_both_ways(span, torch.arange(LENGTH), 0, LENGTH - 1, ramp=5)
    assert torch.equal(alive.long(), (mask > 0).sum(1))
    out = mixer(x, mixer.initial_state(2, keep="nothing"))
    assert float(out.aux.live) == pytest.approx(float((mask > 0).sum(2).double().mean()))


def test_a_token_out_of_reach_changes_nothing_and_one_in_reach_does():
    model = encoder(TransformerXLConfig(span=6), layers=1, positions="none")
    other = TOKENS.clone()
    other[:, 20] = (TOKENS[:, 20] + 1) % 30
    with torch.no_grad():
        change = (model(TOKENS, keep="nothing")[0] - model(other, keep="nothing")[0]).abs().amax((0, 2))
    near = (torch.arange(LENGTH) - 20).abs() < 6
    assert (change[near] > 1e-9).all() and (change[~near] == 0).all()


def test_endless_spans_and_wide_windows_are_full_attention():
    full = encoder(FullConfig())
    for mixer in (TransformerXLConfig(span=LENGTH), replace(learned_spans(10**6), initial_span=0.999)):
        model = encoder(mixer)
        model.load_state_dict(full.state_dict(), strict=False)
        with torch.no_grad():
            (got, _, aux), (want, _, _) = (m(TOKENS, keep="nothing") for m in (model, full))
        assert torch.allclose(got, want, atol=DOUBLE) and aux.live.tolist() == [LENGTH, LENGTH]


def test_only_the_encoder_looks_ahead():
    other = TOKENS.clone()
    other[:, -1] = (TOKENS[:, -1] + 1) % 30
    both = encoder(FullConfig())
    back = Decoder(both.config).double().eval()
    with torch.no_grad():
        for model, moves in ((both, True), (back, False)):
            change = model(TOKENS, keep="nothing")[0][:, 0] - model(other, keep="nothing")[0][:, 0]
            assert bool(change.abs().max() > 1e-9) is moves


# The task


@pytest.mark.parametrize("direction", ["both", "past"])
def test_each_question_has_its_answer_far_away(direction):
    config = LabellingTask(length=96, min_length=24, min_distance=20, max_distance=60, direction=direction, chores=0.2)
    task = Labelling(config)
    sides = set()
    for batch, limit in (
        (next(task.stream("test", batch=8, seed=1)), 20),
        (next(task.stream("train", batch=2, seed=1)), 6),
    ):
        x, y = batch.x.numpy(), batch.y.numpy()
        for row, at in zip(*np.nonzero(task.asked(batch).numpy())):
            name = x[row, at] - task.first_question
            (note,) = np.flatnonzero((x[row] < task.first_rumour) & (x[row] // config.colours == name))
            assert x[row, note] % config.colours == y[row, at]
            assert limit <= abs(at - note) <= 60
            sides.add(bool(at > note))
        topic = x[:, :1] - task.first_topic
        chores = batch.mask.numpy() & ~task.asked(batch).numpy()
        assert (topic >= 0).all() and chores.any() and (y[chores] == (config.colours + topic + 0 * x)[chores]).all()
    assert sides == ({True} if direction == "past" else {True, False})
    batch = next(task.stream("test", batch=8, seed=1))
    after, before = (asked_on_side(task, sign, batch) for sign in (1, -1))
    assert torch.equal(after | before, task.asked(batch)) and not (after & before).any()


def test_batches_can_be_drawn_again_from_their_place():
    task = Labelling(LabellingTask(length=48))
    stream = task.stream("train", batch=2, seed=5)
    next(stream)
    saved = json.loads(json.dumps(stream.state_dict()))
    want = next(stream)
    again = task.stream("train", batch=2, seed=5)
    again.load_state_dict(saved)
    assert torch.equal(next(again).x, want.x) and not torch.equal(next(again).x, want.x)
    assert len(list(task.stream("valid", batch=1, seed=5))) == 8


# (b) Penalties


def test_the_l1_norm_of_attention_is_a_constant():
    """It is 1, its gradient is rounding, and training with it is training without; the other penalties have a gradient."""
    sizes = penalty_gradients()
    assert sizes["l1"] < 1e-15
    assert all(sizes[name] > 1e-3 for name in PENALTIES if name != "l1")
    task = Labelling(replace(cells.NOTES, length=48))
    trained = []
    for penalty, weight in (("none", 0.0), ("l1", 1.0), ("entropy", 1.0)):
        model = penalised(penalty, task.codec.size)
        fit(model, task.stream("train", batch=1, seed=0), TrainConfig(steps=4, lr=1e-3, warmup=1, span_weight=weight))
        trained.append(torch.cat([p.flatten() for p in model.parameters()]))
    none, l1, entropy = trained
    assert (l1 - none).abs().max() < 1e-9 < 1e-4 < (entropy - none).abs().max()


def penalised(penalty: str, vocab: int = 30) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(replace(small_model(vocab, 1, "none", FullConfig()), dim=16, heads=2, ff_dim=16))
    return penalise(decoder, penalty).double()


def test_without_dropping_it_is_full_attention():
    model = penalised("entropy").eval()
    torch.manual_seed(0)
    # From the same seed: the mixer in place of another takes over its weights.
    plain = Decoder(model.config).double().eval()
    with torch.no_grad():
        (got, _, aux), (want, _, also) = (m(TOKENS, keep="nothing") for m in (model, plain))
        assert torch.allclose(got, want, atol=DOUBLE) and aux.live.tolist() == also.live.tolist()
        model.layers()[0].mixer.drop = Drop(threshold=0.0)
        assert torch.allclose(model(TOKENS, keep="nothing")[0], want, atol=DOUBLE)


def test_penalties_are_what_they_say():
    scores = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).masked_fill(
        torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf
    )
    weight = torch.softmax(scores, -1)
    rows = [torch.distributions.Categorical(row[: t + 1]).entropy() for head in weight[0] for t, row in enumerate(head)]
    assert float(PENALTIES["entropy"](weight, scores)) == pytest.approx(float(torch.stack(rows).mean()), rel=DOUBLE)
    assert float(PENALTIES["l1"](weight, scores)) == pytest.approx(1, rel=DOUBLE)
    assert float(PENALTIES["unnormalised"](weight, scores)) == pytest.approx(float(scores.exp().sum() / 10), rel=DOUBLE)
    spread_out, piled = torch.eye(5).expand(1, 1, 5, 5), F.one_hot(torch.zeros(5, dtype=torch.long), 5).float()
    columns = PENALTIES["columns"]
    assert float(columns(spread_out, scores)) > float(columns(piled.expand(1, 1, 5, 5), scores))


def hand_made_scores() -> torch.Tensor:
    """Every query reads memory 1 a little more; the last query needs memory 3, which nobody has read before."""
    scores = torch.zeros(1, 1, 12, 12, dtype=torch.float64)
    scores[..., 1] = 3.0
    scores[..., -1, :] = 0.0
    scores[..., -1, 3] = 9.0
    return scores.masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -torch.inf)


def test_the_cache_keeps_what_was_read_and_loses_what_will_be():
    """What fails: a memory that is needed only at the end gets no attention before, so only hindsight keeps it."""
    scores = hand_made_scores()
    weight = torch.softmax(scores, -1)
    past, held = drop_unread(scores, weight, Drop(keep=1, grace=2))
    assert past[0, 0, -1, 3] == 0 and past[0, 0, -2, 1] > 0.5
    assert float(held) == pytest.approx((1 + 2 + 10 * 3) / 12, rel=DOUBLE)
    future, _ = drop_unread(scores, weight, Drop(keep=2, grace=2, hindsight=True))
    assert future[0, 0, -1, 3] > 0.9
    for rule in (Drop(keep=3, grace=2), Drop(threshold=0.05, grace=2), Drop(threshold=10.0, grace=3)):
        rows, held = drop_unread(scores, weight, rule)
        assert torch.allclose(rows.sum(-1), torch.ones(1, 1, 12, dtype=torch.float64)) and float(held) <= 6.5
    assert float(drop_unread(scores, weight, Drop(threshold=10.0, grace=3))[1]) == pytest.approx((1 + 2 + 3 * 10) / 12)


def test_the_cache_uses_the_past_only():
    """Changing later scores changes no earlier row of attention; in hindsight it does."""
    scores = torch.randn(2, 2, 20, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), -torch.inf)
    other = scores.clone()
    other[:, :, 15:] *= -3
    for rule in (Drop(keep=4), Drop(threshold=0.1), Drop(keep=4, hindsight=True)):
        a, b = (drop_unread(s, torch.softmax(s, -1), rule)[0][:, :, :15] for s in (scores, other))
        assert torch.equal(a, b) is not rule.hindsight


# Training and the study


def test_a_small_encoder_learns_with_few_tokens_alive():
    """The claim of the first question in little: right labels far away, while queries read a part of the sequence."""
    torch.manual_seed(0)
    task = Labelling(LabellingTask(length=48, min_length=16, names=3, colours=2, min_distance=12, fillers=4))
    model = Encoder(replace(small_model(task.codec.size, 1, "none", learned_spans(48)), dim=32, ff_dim=32))
    budget = replace(cells.BUDGET, live=14, start_loss=0.3, patience_loss=0.3)
    fit(model, task.stream("train", batch=8, seed=0), replace(cells.TRAIN, steps=260, lr=1e-2, budget=budget))
    found = measure(model, task.stream("test", batch=16, seed=0), task.asked)
    assert found.accuracy > 0.9 and found.live < 24, found
    spans = cells.spans_by_kind(model, task, next(task.stream("test", batch=8, seed=1)).x)
    assert spans["note"][0] > 3 * spans["filler"][0]


def test_summary_takes_equal_memory_from_the_same_seed():
    rule = asdict(Drop(keep=2))
    curve = [{"rule": rule, "accuracy": a, "live": n} for a, n in ((0.3, 4.0), (0.6, 8.0), (0.9, 16.0))]
    curve.append({"rule": {**rule, "hindsight": True, "keep": 8}, "accuracy": 1.0, "live": 4.0})
    assert best_within(curve, 8.0, False) == 0.6 and best_within(curve, 1.0, False) == 0.3


def test_study_writes_its_page_and_goes_on_where_it_was(tmp_path, monkeypatch):
    """A tiny plan from end to end; a second call runs nothing; another plan in the same folder is refused."""
    ran = []

    def work(cell, folder, tick):
        ran.append(cell.name)
        return cells.run_cell(cell, folder, tick)

    def run_here(_, jobs, folder, processes):
        for job in jobs:
            if folder.read_cell(job.name) is None:
                folder.write_cell(job.name, work(job, folder, lambda n: None))
        return {job.name: folder.read_cell(job.name) for job in jobs}

    monkeypatch.setattr(study, "run_jobs", run_here)
    monkeypatch.setattr(cells, "LONG", 128)
    monkeypatch.setattr(cells, "ENCODER_TASK", replace(cells.ENCODER_TASK, length=48, min_distance=8))
    monkeypatch.setattr(cells, "NOTES", replace(cells.NOTES, length=32, min_distance=6))
    plan = replace(QuestionsSettings.quick(), encoder_steps=2, span_steps=2, attention_steps=2)
    path, result = run_study(plan, tmp_path / "out", 1)
    assert len(ran) == len(plan.jobs) == 6
    page = (path / "report.html").read_text()
    assert "Can it work in an encoder?" in page and page.count("<svg") == 3 and "http" not in page.split("</style>")[1]
    assert json.loads((path / "study.json").read_text())["cache"] == result["cache"]
    assert {"questions_encoder.png", "questions_cache.png"} <= {p.name for p in path.iterdir()}
    (path / "cells" / f"{plan.jobs[0].name}.json").unlink()
    assert run_study(plan, tmp_path / "out", 1)[1]["encoder"][0]["accuracy"] == result["encoder"][0]["accuracy"]
    assert len(ran) == 7
    with pytest.raises(ValueError, match="give another --out"):
        run_study(replace(plan, span_steps=3), tmp_path / "out", 1)


def test_full_plan_covers_what_the_documents_say():
    jobs = QuestionsSettings().jobs
    assert len({job.name for job in jobs}) == len(jobs) and QuestionsSettings().seeds >= 3
    assert {j.system for j in jobs if isinstance(j, EncoderCell)} == {"full", "spans", "window"}
    assert {j.penalty for j in jobs if isinstance(j, CacheCell)} == {"none", *PENALTIES} - {"l1"}
    assert {j.task for j in jobs if isinstance(j, CacheCell)} == {"notes", "chores", "recall"}
    assert summarise([]) == {"encoder": [], "cache": []}


@pytest.mark.parametrize("args", [["--jobs", "0"], ["--seeds", "-1"], ["--quik"]])
def test_bad_options_are_one_sentence(args, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["study", "questions", *args]) == 2
    said = capsys.readouterr().err
    assert said.startswith("expire-span: ") and args[0] in said and list(tmp_path.iterdir()) == []


def test_budget_is_off_where_no_spans_are():
    assert not BudgetConfig().active and not cells.BUDGET.active


def test_a_quick_study_says_so_on_its_page(tmp_path):
    assert is_quick(QuestionsSettings.quick(3)) and not is_quick(QuestionsSettings())
    page = {"title": "t", "lead": "l", "facts": [], "sections": []}
    for quick in (True, False):
        text = write_page(tmp_path / "p.html", **page, headline="Five of six.", quick=quick).read_text()
        assert ('id="quick"' in text) == quick and "Five of six." in text


def test_one_seed_has_no_deviation():
    assert percent(spread([0.5])) == "50.0%" and percent(spread([0.4, 0.6])) == "50.0 ± 14.1%"
