"""What decides how long memories live: where spans start, how heads share or learn them, and where they end."""

from dataclasses import replace

import pytest
import torch

from expire_span.config import ExpireSpanConfig
from expire_span.models.adaptive_span import HeadSpans
from expire_span.models.decoder import Decoder
from expire_span.models.span_predictor import RATE, ReachPredictor, SpanPredictor

from .test_mixers import CONFIGS, EXPIRE, tokens


def test_noisy_spans_only_shorten_in_training():
    config = CONFIGS["modern"]
    torch.manual_seed(0)
    model = Decoder(replace(config, mixer=replace(config.mixer, noisy=True)))
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
    """Two heads share theirs out among tokens, up to the longest span; two give it to all."""
    fields = dict(span_per="kv_head", own_heads=2, reach="learned", initial_span=0.2, initial_spread=16.0, min_span=2.0)
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
    reach, bias = ReachPredictor(8, 3, 3, replace(rules, reach="learned")), SpanPredictor(8, 3, rules)
    torch.nn.init.normal_(reach.weight, std=2)
    reached = torch.tensor([1.0, 30.0, 90.0])
    reach.reach.data, bias.weight.data = torch.log1p(reached / 32) / RATE, reach.weight.data
    bias.bias.data = (reached / 100).logit()
    h = torch.randn(2, 50, 8)
    torch.testing.assert_close(reach(h), bias(h))
    reach.reach.data = torch.tensor([-0.1, 0.0, 1.0])
    closed, open_ = reach(1e3 * h).detach().split([2, 1], 1)
    assert float(closed.abs().max()) == 0 and float((open_ - 100).abs().max()) < 1e-3


def test_heads_beyond_those_with_tokens_of_their_own_may_end_nearer():
    fields = dict(span_per="kv_head", reach="learned", own_heads=1, initial_span=0.2, min_span=2.0, near_span=-20.0)
    predictor = ReachPredictor(8, 4, 1, ExpireSpanConfig(max_span=100, **fields))
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), torch.full((1, 4, 3), 20.0))
    torch.nn.init.constant_(predictor.reach, -0.1)
    shortest = torch.tensor([2.0, -20.0, -20.0, -20.0])[None, :, None].expand(1, 4, 3)
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), shortest)
    torch.nn.init.constant_(predictor.reach, 1.0)
    torch.testing.assert_close(predictor(torch.randn(1, 3, 8)), torch.full((1, 4, 3), 100.0))


def test_heads_start_apart_and_some_share():
    fields = dict(span_per="kv_head", own_heads=2, initial_span=0.2, initial_spread=16.0)
    config = replace(CONFIGS["modern"], kv_heads=4, mixer=replace(CONFIGS["modern"].mixer, **fields))
    span = Decoder(config)(tokens())[2].layers[0].span  # [B, Hkv, T]
    torch.testing.assert_close(span[0, :, 0], torch.tensor([0.8, 0.2, 0.05, 0.05]) * 30)


@torch.no_grad()
def test_heads_that_share_count_as_many():
    """The loss and the number alive are means over heads, however few rows of spans there are."""
    shared = replace(
        EXPIRE["modern, heads that share"], mixer=replace(EXPIRE["modern, heads that share"].mixer, own_heads=2)
    )
    each = replace(shared, mixer=replace(shared.mixer, own_heads=None))
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
        got, want = (model.train()(tokens(), remember=False) for model in (few, all_heads))
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2].loss, want[2].loss)
        torch.testing.assert_close(got[2].live, want[2].live)


def test_a_least_span_is_kept():
    predictor = SpanPredictor(8, 1, ExpireSpanConfig(max_span=100, min_span=5.0, initial_span=0.2))
    span = predictor(torch.randn(2, 3, 8))
    torch.testing.assert_close(span, torch.full_like(span, 20.0))
    torch.nn.init.constant_(predictor.bias, -20)
    torch.testing.assert_close(predictor(torch.randn(2, 3, 8)), torch.full_like(span, 5.0))


def test_a_least_reach_is_kept_and_left_at_once():
    """What leads further down is dropped of the sum over all tokens, not of each: what is left would be noise that leads up."""
    rules = ExpireSpanConfig(max_span=100, min_span=5.0, span_per="kv_head", reach="learned")
    predictor = ReachPredictor(8, 2, 1, rules)
    torch.nn.init.constant_(predictor.reach, -0.1)
    h, pushes = torch.randn(2, 50, 8), torch.randn(2, 2, 50, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(predictor(h), torch.full((2, 2, 50), 5.0))
    for push in (pushes + 0.5, pushes - 0.5):  # a step goes against the gradient; single tokens push both ways
        assert push.min() < 0 < push.max()
        (grad,) = torch.autograd.grad((predictor(h) * push).sum(), predictor.reach)
        torch.testing.assert_close(grad, (rules.ramp * RATE * push.sum((0, 2))).clamp_max(0))


def test_a_closed_head_of_adaptive_span_opens_again_at_once():
    """Pressure on a span that is zero already does not pile up."""
    spans = HeadSpans(2, 100, 0.1)
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


@pytest.mark.parametrize("reach", ["fixed", "learned"])
def test_a_predictor_that_only_reads_leaves_hidden_states_alone(reach):
    rules = ExpireSpanConfig(max_span=64, span_per="kv_head", reach=reach)
    grads = {}
    for shapes_states in (True, False):
        torch.manual_seed(0)
        own = replace(rules, shapes_states=shapes_states)
        predictor = ReachPredictor(16, 4, 2, own) if reach == "learned" else SpanPredictor(16, 4, own)
        torch.nn.init.normal_(predictor.weight)
        h = torch.randn(2, 9, 16, requires_grad=True)
        (predictor(h) * torch.randn(2, 4, 9)).sum().backward()
        grads[shapes_states] = h.grad, predictor.weight.grad
    assert grads[True][0] is not None and float(grads[True][0].norm()) > 1 and grads[False][0] is None
    torch.testing.assert_close(grads[False][1], grads[True][1])
