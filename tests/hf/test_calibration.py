"""Spans to start from follow the base model's attention and meet the budget; standardised states change no span."""

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf import RetrofitConfig, calibration, retrofit
from expire_span.hf.calibration import BIN, ages_of, fit, interpolate, lost_attention, mean_slope, observe
from expire_span.hf.predictors import build_predictor
from expire_span.ops import expire_attention
from expire_span.settings.retrofit import DistillConfig
from expire_span.train.distiller import Distiller
from tests.error_budget import reordered
from tests.hf_models import tiny, tokens


def test_lost_attention_is_what_later_queries_pay():
    """Against the definition, wherever an age ends with a bin; between, it falls from one bin to the next."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
    ages = torch.tensor([7.0, 15.0, 31.0, 100.0, 400.0])
    got = lost_attention(query, key, 0.5, ages)
    scores = query.unflatten(1, (2, 2)).double() @ key.double().unsqueeze(2).mT * 0.5
    causal = torch.ones(300, 300, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1).sum(2)  # [B, Hkv, T, S]
    place, checked = torch.arange(300), 0
    # A sum over 300 queries of 2 heads, after a softmax, after products; at most all that a memory is paid.
    rounding = reordered(600, depth=3, size=float(weights.sum(2).max()))
    for n, age in enumerate(ages.tolist()):
        late = place.unsqueeze(1) > place + age
        want = (weights * late).sum(2)
        ends = (place + age + 1) % BIN == 0
        checked += int(ends.sum())
        assert (got[..., n] - want)[..., ends].abs().max() < rounding
        assert (got[..., n] - want).abs().max() <= (weights.unflatten(2, (-1, 1)).sum(3)).amax() * BIN
    assert checked > 60 and bool((got[..., :-1] >= got[..., 1:] - rounding).all()) and not got[..., -1].any()


def test_between_ages_the_loss_is_a_line_with_its_gradient():
    ages = ages_of(64).double()
    lost = torch.linspace(1, 0, len(ages), dtype=torch.float64).expand(2, 1, -1)
    span = torch.stack([ages[2], (ages[3] * ages[4]).sqrt()]).unsqueeze(1).requires_grad_()
    found = interpolate(lost, ages, span)
    step = 1 / (len(ages) - 1)
    want = torch.tensor([1 - 2 * step, 1 - 3.5 * step], dtype=torch.float64)
    rounding = reordered(1, depth=4)  # the ages are float32 numbers, each the one before times a ratio
    assert torch.allclose(found.flatten(), want, rtol=0, atol=rounding)
    found.sum().backward()
    slope = -step / (span.detach() * torch.log(ages[1] / ages[0]))
    assert torch.allclose(span.grad, slope, rtol=rounding, atol=0)


def test_standardised_states_change_no_span():
    torch.manual_seed(0)
    config = RetrofitConfig(max_span=100, ramp=8, temperature=2.0)
    predictor = build_predictor(16, 2, config)
    states = torch.randn(3, 50, 16) * torch.logspace(-1, 2, 16) + torch.linspace(-30, 30, 16)
    with torch.no_grad():
        predictor.weight.copy_(torch.randn(2, 16) / states.std((0, 1)))
        before = predictor(states)
        predictor.standardise(states)
        assert (predictor(states) - before).abs().max() < 1e-2 and float(before.std()) > 10  # of 100 tokens
        form = predictor.span_form(16)
        sigmoid = torch.sigmoid(states @ form.weight.T + form.bias)
        assert (form.low + form.room * sigmoid - predictor(states).mT).abs().max() < 1e-2
        product = (states - predictor.center) * predictor.scale
        assert product.mean((0, 1)).abs().max() < 1e-3 and (product.std((0, 1)) - 1).abs().max() < 1e-3


def test_calibrated_spans_meet_the_budget_and_follow_attention():
    """In layer 1, one head looks far back at every eighth token and the other at none: that is where memory must go."""
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=256, ramp=8, keep_first=2))
    found = observe(retrofitted, [(ids, torch.ones(ids.shape)) for ids in tokens(4, 256).split(1)])
    assert sorted(found) == [0, 1] and found[0].hidden.shape == (4 * 254, 32) and float(found[0].rest[0]) == 253
    ages, seen = ages_of(256), found[1]
    wanted = torch.arange(len(seen.rest)) % 8 == 0
    seen.hidden[:, 5] += 8.0 * wanted
    left = (1 - ages / seen.rest.clamp_min(1).unsqueeze(1)).clamp_min(0)  # equal attention at all later times
    seen.lost[:, 0], seen.lost[:, 1] = 2.0 * wanted.unsqueeze(1) * left, 0.0
    live = fit(retrofitted, found, 256, 64.0, steps=120)
    assert 63 < live < 65 and mean_slope(retrofitted, found) > 1
    with torch.no_grad():
        span = retrofitted.predictors["1"](seen.hidden.unsqueeze(0))[0]  # [Hkv, N]
    seen_again, never = float(span[0][wanted].mean()), (float(span[0][~wanted].mean()), float(span[1].mean()))
    assert seen_again > 60 and seen_again > 3 * max(never), (seen_again, never)


def test_distillation_starts_from_calibrated_spans(monkeypatch):
    monkeypatch.setattr(calibration, "STEPS", 60)
    retrofitted = retrofit(tiny(), RetrofitConfig(max_span=128, ramp=8, keep_first=2))
    settings = DistillConfig(budget=0.375, calibrate=3, context=128, block=128, batch=2, steps=4, device="cpu")
    learner = Distiller(retrofitted, list(tokens(4, 200)), settings)
    line = learner.step(0)
    assert line["goal"] == learner.target == 48 and 36 < line["live"] < 62
    assert line["weight"] != pytest.approx(settings.initial_weight)  # balanced against the divergence
    assert learner.calibrated and learner.state_dict()["calibrated"]


def test_transposed_spans_of_one_row_get_their_gradient():
    """Predictors give spans [B, Hkv, S] as a transposed view; with one row the operator sees those strides."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 300, 8), torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    spans, grads = torch.rand(1, 300, 2) ** 3 * 200, []
    for transposed in (True, False):
        leaf = spans.clone().requires_grad_()
        span = leaf.transpose(1, 2) if transposed else leaf.transpose(1, 2).contiguous()
        place = torch.arange(300)
        expire_attention(q, k, v, span, place, place, ramp=8, impl="chunked").square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads) and grads[0].abs().max() > 1e-3
