"""What decides how long memories live: where spans start, how heads share or learn them, and where they end."""

from dataclasses import replace

import pytest
import torch

from expire_span.models.decoder import Decoder
from expire_span.models.lifetimes import REACH_RATE, Lifetimes, ReachLifetimes, build_lifetimes
from expire_span.models.systems.adaptive_span import AdaptiveSpanConfig
from expire_span.models.systems.adaptive_span.layer import HeadLifetimes
from expire_span.models.systems.expire_span import HeadReach, PaperDetails
from expire_span.settings.run import ExpireSpanConfig
from tests.models.test_mixers import CONFIGS, EXPIRE, tokens


def test_noisy_spans_only_shorten_in_training():
    config = CONFIGS["modern"]
    torch.manual_seed(0)
    model = Decoder(replace(config, mixer=replace(config.mixer, paper=PaperDetails(noisy=True))))
    x = tokens()
    assert not torch.equal(model.train()(x)[0], model(x)[0])
    assert torch.equal(model.eval()(x)[0], model(x)[0])
    assert torch.equal(model.train()(x)[2].layers[0].span, model(x)[2].layers[0].span), (
        "deletion must see unclamped spans"
    )


def test_spans_start_at_the_asked_share():
    for share in (0.01, 0.1, 0.9):
        config = replace(CONFIGS["modern"], mixer=replace(CONFIGS["modern"].mixer, initial_span=share))
        span = Decoder(config)(tokens())[2].layers[0].span
        torch.testing.assert_close(span, torch.full_like(span, share * 30))


def test_heads_learn_their_reach():
    """Two heads distribute their average span over tokens, up to the longest span; two give it to all tokens alike."""
    reach = HeadReach(True, own_heads=2, spread=16.0)
    fields = dict(span_per="kv_head", reach=reach, initial_span=0.2, min_span=2.0)
    config = replace(CONFIGS["modern"], kv_heads=4, mixer=replace(CONFIGS["modern"].mixer, **fields))
    model = Decoder(config)
    start = torch.tensor([0.8, 0.8 / 16 ** (1 / 3), 0.8 / 16 ** (2 / 3), 0.05]) * 30
    span = model(tokens())[2].layers[0].span  # [B, Hkv, T]
    torch.testing.assert_close(span, start.clamp_min(2)[None, :, None].expand_as(span))
    predictor = model.layers()[0].mixer.span_predictor
    torch.nn.init.normal_(predictor.weight, std=3)
    span = model(tokens())[2].layers[0].span
    spread = span.amax(-1) - span.amin(-1)
    assert spread[:, :2].min() > 0 and spread[:, 2:].max() == 0
    assert span.max() <= 30 and span[:, 2:].min() >= 2


def test_a_learned_reach_is_the_bias_of_the_predictor_in_steps():
    """L sigmoid(w . h / tau + b) with b = logit(z / L); a closed head stays closed whatever a token's features say."""
    rules = ExpireSpanConfig(max_span=100, span_per="kv_head", temperature=3.0)
    learned = replace(rules, reach=HeadReach(True))
    reach, bias = ReachLifetimes(8, 3, learned), Lifetimes(8, 3, rules)
    torch.nn.init.normal_(reach.weight, std=2)
    reached = torch.tensor([1.0, 30.0, 90.0])
    reach.reach.data, bias.weight.data = torch.log1p(reached / 32) / REACH_RATE, reach.weight.data
    bias.bias.data = (reached / 100).logit()
    h = torch.randn(2, 50, 8)
    torch.testing.assert_close(reach(h), bias(h))
    reach.reach.data = torch.tensor([-0.1, 0.0, 1.0])
    closed, open_ = reach(1e3 * h).detach().split([2, 1], 1)
    assert float(closed.abs().max()) == 0 and float((open_ - 100).abs().max()) < 1e-3


def test_heads_beyond_those_with_tokens_of_their_own_may_end_nearer():
    reach = HeadReach(True, own_heads=1, shortest_shared=-20.0)
    fields = dict(span_per="kv_head", reach=reach, initial_span=0.2, min_span=2.0)
    predictor = ReachLifetimes(8, 4, ExpireSpanConfig(max_span=100, **fields))
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), torch.full((1, 4, 3), 20.0))
    torch.nn.init.constant_(predictor.reach, -0.1)
    shortest = torch.tensor([2.0, -20.0, -20.0, -20.0])[None, :, None].expand(1, 4, 3)
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), shortest)
    torch.nn.init.constant_(predictor.reach, 1.0)
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), torch.full((1, 4, 3), 100.0))


def test_heads_start_apart_and_some_share():
    fields = dict(span_per="kv_head", initial_span=0.2, reach=HeadReach(own_heads=2, spread=16.0))
    config = replace(CONFIGS["modern"], kv_heads=4, mixer=replace(CONFIGS["modern"].mixer, **fields))
    span = Decoder(config)(tokens())[2].layers[0].span  # [B, Hkv, T]
    torch.testing.assert_close(span[0, :, 0], torch.tensor([0.8, 0.2, 0.05, 0.05]) * 30)


@torch.no_grad()
def test_a_shared_row_of_spans_counts_for_all_its_heads():
    """The loss and the number alive are means over heads, however few rows of spans there are."""
    base = EXPIRE["modern, heads that share"]
    shared, each = (
        replace(base, mixer=replace(base.mixer, reach=replace(base.mixer.reach, own_heads=own))) for own in (2, None)
    )
    for loss in ("l1", "ramp"):
        few, all_heads = (Decoder(replace(c, mixer=replace(c.mixer, span_loss=loss))).double() for c in (shared, each))
        weights = few.state_dict()
        for (
            name,
            value,
        ) in all_heads.state_dict().items():  # the last row four heads are given is the one that two share
            if "span_predictor" in name:
                few_rows = torch.randn_like(weights[name])
                few.state_dict()[name].copy_(few_rows)
                value.copy_(torch.cat([few_rows, few_rows[-1:]]))
            else:
                value.copy_(weights[name])
        got, want = (model.train()(tokens(), keep="nothing") for model in (few, all_heads))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2].loss, want[2].loss)
        torch.testing.assert_close(got[2].live, want[2].live)


def test_a_least_span_is_kept():
    predictor = Lifetimes(8, 1, ExpireSpanConfig(max_span=100, min_span=5.0, initial_span=0.2))
    span = predictor(torch.randn(2, 3, 8))
    torch.testing.assert_close(span, torch.full_like(span, 20.0))
    torch.nn.init.constant_(predictor.bias, -20)
    torch.testing.assert_close(predictor(torch.randn(2, 3, 8)), torch.full_like(span, 5.0))


def test_a_head_at_its_least_reach_stays_there_and_can_leave_at_once():
    """An outward gradient is dropped from the sum over tokens, not from each token, which would leave an inward bias."""
    rules = ExpireSpanConfig(max_span=100, min_span=5.0, span_per="kv_head", reach=HeadReach(True, own_heads=1))
    predictor = ReachLifetimes(8, 2, rules)
    torch.nn.init.constant_(predictor.reach, -0.1)
    h, pushes = torch.randn(2, 50, 8), torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(predictor(h), torch.full((2, 2, 50), 5.0))
    for push in (pushes + 0.5, pushes - 0.5):  # a step goes against the gradient; single tokens push both ways
        assert push.min() < 0 < push.max()
        (grad,) = torch.autograd.grad((predictor(h) * push).sum(), predictor.reach)
        torch.testing.assert_close(grad, (rules.ramp * REACH_RATE * push.sum((0, 2))).clamp_max(0))


def test_a_closed_head_of_adaptive_span_opens_again_at_once():
    """An outward gradient on a span that is already zero does not move the parameter further out."""
    spans = HeadLifetimes(2, AdaptiveSpanConfig(max_span=100, initial_span=0.1))
    optimizer = torch.optim.Adam(spans.parameters(), lr=0.05)

    def press(sign: float, steps: int) -> torch.Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            (sign * spans(torch.zeros(1, 1, 4)).sum()).backward()
            optimizer.step()
        return spans(torch.zeros(1, 1, 4)).detach()

    assert press(1.0, 300).abs().max() == 0
    assert spans.ratio.min() > -0.5, "momentum carries a ratio a little below zero, no further"
    assert press(-1.0, 20).min() > 0


@pytest.mark.parametrize("learned", [False, True])
def test_a_predictor_with_a_stopped_gradient_leaves_hidden_states_alone(learned):
    rules = ExpireSpanConfig(max_span=64, span_per="kv_head", reach=HeadReach(learned))
    grads = {}
    for stop in (False, True):
        torch.manual_seed(0)
        predictor = build_lifetimes(16, 4, replace(rules, reach=replace(rules.reach, stop_gradient=stop)))
        torch.nn.init.normal_(predictor.weight)
        h = torch.randn(2, 9, 16, requires_grad=True)
        (predictor(h) * torch.randn(2, 4, 9)).sum().backward()
        grads[stop] = h.grad, predictor.weight.grad
    assert grads[False][0] is not None and float(grads[False][0].norm()) > 1 and grads[True][0] is None
    torch.testing.assert_close(grads[True][1], grads[False][1])
