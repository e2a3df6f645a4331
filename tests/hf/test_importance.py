"""What the calibration takes for needed: the largest attention weight while a context is repeated and asked about."""

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf import RetrofitConfig, importance, retrofit
from expire_span.hf.calibration import fit, mean_slope, observe
from expire_span.hf.importance import Reading, needed_weights, pieces_of
from expire_span.settings.retrofit import DistillConfig
from expire_span.train.distiller import Distiller
from expire_span.train.lessons import Row
from expire_span.train.mixture import Contexts, Mixture
from tests.error_budget import reordered
from tests.hf_models import tiny, tokens


def dense(query, key, scale, asks, apart):
    """The definition: all weights at once, in float64."""
    count, length = len(asks), query.shape[2]
    scores = query.unflatten(1, (key.shape[1], -1)).double() @ key.double().unsqueeze(2).mT * scale
    weights = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    own = asks.nonzero().flatten()
    if length == count:
        place = torch.arange(count)
        found = weights.masked_fill(place.unsqueeze(1) - place < apart, 0).amax((2, 3))
    else:
        found = weights[:, :, :, count:, :count].amax((2, 3))
    for n in range(int(own[0]) if len(own) else 0):
        found[..., n] = torch.maximum(found[..., n], weights[:, :, :, own, n].amax((2, 3)))
    return found


@pytest.mark.parametrize("queries", [7, 256])
@pytest.mark.parametrize("asked", [(), (20, 21, 37), (0, 3)])
@pytest.mark.parametrize("behind", [0, 33])
def test_needed_is_the_largest_weight_in_any_chunks(monkeypatch, queries, asked, behind):
    torch.manual_seed(0)
    monkeypatch.setattr(importance, "QUERIES", queries)
    query, key = torch.randn(1, 4, 40 + behind, 8), torch.randn(1, 2, 40 + behind, 8)
    asks = torch.zeros(40, dtype=torch.bool)
    asks[list(asked)] = True
    got = needed_weights(query, key, 0.5, asks, 5)
    assert got.shape == (1, 2, 40)
    assert (got - dense(query, key, 0.5, asks, 5)).abs().max() < reordered(80, depth=3)


def test_observations_are_those_of_the_models_own_attention():
    """Against transformers' eager attention weights in float64, the context repeated in one piece and in three."""
    model = tiny().double()
    model.set_attn_implementation("eager")
    handle = retrofit(model, RetrofitConfig(max_span=256, ramp=8, keep_first=2))
    ids, asks = tokens(1, 60), torch.zeros(60, dtype=torch.bool)
    asks[50:] = True
    pieces = pieces_of(ids[0], 20)
    assert [len(x) for x in pieces] == [20, 20, 20]
    found = observe(handle, [Reading(ids, torch.ones(1, 60), asks, pieces)])
    wanted = {n: torch.zeros(2, 60, dtype=torch.float64) for n in found}
    with torch.no_grad(), handle.paused() as base:
        for piece in pieces:
            weights = base(torch.cat([ids, piece[None]], 1), output_attentions=True, use_cache=False).attentions
            for n in found:
                by_head = weights[n][0].unflatten(0, (2, -1)).amax(1)  # [Hkv, T, S]
                told = by_head[:, 60:, :60].amax(1)
                told[:, :50] = torch.maximum(told[:, :50], by_head[:, 50:60, :50].amax(1))
                wanted[n] = torch.maximum(wanted[n], told)
    for n, seen in found.items():
        assert seen.needed.shape == (58, 2) and float(seen.rest[0]) == 57
        assert (seen.needed.T - wanted[n][:, 2:]).abs().max() < reordered(200, depth=20)


def test_pieces_have_about_equal_lengths():
    assert [len(x) for x in pieces_of(torch.arange(100), 49)] == [34, 34, 32]
    assert pieces_of(torch.arange(9), 9)[0].tolist() == list(range(9))
    assert pieces_of(torch.arange(9), 0) == [] and pieces_of(torch.arange(0), 9) == []


def test_a_context_is_read_again_in_the_room_that_the_model_has():
    contexts = Contexts.of_rows([Row(torch.arange(1, 41))])
    mixture = Mixture({}, begins=4)
    reading = mixture.read_again(contexts, 18)
    assert torch.cat(list(reading.again)).tolist() == list(range(5, 41)) and [len(x) for x in reading.again] == [18, 18]
    assert not reading.asks.any() and not mixture.read_again(contexts, 0).again
    answers = torch.arange(40) >= 36
    assert mixture.read_again(Contexts.of_rows([Row(torch.arange(40), answers)]), 0).asks.nonzero().flatten()[0] == 35


def needing(handle):
    """Observations in which one head of layer 1 needs every eighth memory, which its state shows, and nobody anything else."""
    ids = tokens(4, 256)
    readings = [Reading(x[None], torch.ones(1, 256), torch.zeros(256, dtype=torch.bool)) for x in ids]
    found = observe(handle, readings)
    seen, wanted = found[1], torch.arange(len(found[1].rest)) % 8 == 0
    for x in found.values():
        x.needed.fill_(1e-4)
    seen.hidden[:, 5] += 8.0 * wanted
    seen.needed[:, 0] = torch.where(wanted, 0.5, 1e-4)
    return found, wanted


def test_fitted_spans_meet_the_budget_and_keep_what_is_needed():
    handle = retrofit(tiny(), RetrofitConfig(max_span=1024, ramp=8, keep_first=2))
    found, wanted = needing(handle)
    assert sorted(found) == [0, 1] and found[0].hidden.shape == (4 * 254, 32) and float(found[0].rest[0]) == 253
    live, price = fit(handle, found, 24.0)
    assert 23 < live < 25 and torch.tensor(1e-4).log() < price < torch.tensor(0.5).log()
    with torch.no_grad():
        span = handle.predictors["1"](found[1].hidden.unsqueeze(0))[0]  # [Hkv, N]
    kept, never = float(span[0][wanted].median()), max(float(span[0][~wanted].median()), float(span[1].median()))
    assert kept > 256 and never < 40, (kept, never)
    assert mean_slope(handle, found) > 0


def test_what_died_before_its_question_gets_a_longer_span(monkeypatch):
    """Every memory is dead long before the end of its context, where distillation has no gradient: the reminder has one."""
    from expire_span.train import distiller

    handle = retrofit(tiny(), RetrofitConfig(max_span=1024, ramp=8, keep_first=2))
    settings = DistillConfig(budget=0.25, calibrate=2, context=128, block=128, batch=1, steps=4, device="cpu")
    learner = Distiller(handle, list(tokens(4, 200)), settings)
    learner.calibrate()
    with torch.no_grad():
        for predictor in handle.predictors.values():
            predictor.bias.fill_(-1000.0)
            predictor.weight.zero_()
    gradients = []
    for weight in (0.0, distiller.REMINDER):
        monkeypatch.setattr(distiller, "REMINDER", weight)
        learner.optimizer.zero_grad()
        learner.read(Contexts.plain(tokens(1, 128)), torch.zeros(()))
        learner._remind()
        gradients.append(torch.stack([p.bias.grad for p in handle.predictors.values()]))
    assert not gradients[0].any() and bool((gradients[1] < 0).all())  # a step against it lengthens spans


def test_a_model_without_room_behind_a_context_is_fitted_to_what_it_read():
    handle = retrofit(tiny(), RetrofitConfig(max_span=256, ramp=8, keep_first=2))
    ids = tokens(1, 128)
    found = observe(handle, [Reading(ids, torch.ones(1, 128), torch.zeros(128, dtype=torch.bool))])
    assert (
        bool((found[0].needed[:118] > 0).all()) and not found[0].needed[118:].any()
    )  # of 126, the last 8 are too young
