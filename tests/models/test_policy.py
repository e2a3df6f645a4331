"""The policy: every form of observation is read, actions are drawn and scored rightly, memory is carried."""

from __future__ import annotations

import pytest
import torch

from expire_span.models.actions import Choices
from expire_span.models.observations import ObservationEncoder
from expire_span.models.policy import Policy
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.settings.agent import ObservationField, PolicyConfig

FIELDS = {
    "numbers": ObservationField("numbers", "numbers", (2, 3)),
    "number": ObservationField("number", "numbers", ()),
    "choice": ObservationField("choice", "choices", (), (4,), (2,)),
    "choices": ObservationField("choices", "choices", (3,), (2, 5, 3), (0, 1, 0)),
    "words": ObservationField("words", "words", (4,), (7,) * 4, (0,) * 4),
    "grid": ObservationField("grid", "grid", (3, 3, 3)),
}


def draw(field: ObservationField, batch: int, steps: int) -> torch.Tensor:
    """Any observation of a field, [B, T, *shape]."""
    shape = (batch, steps, *field.shape)
    if field.form == "numbers":
        return 10 * torch.randn(shape)
    if field.form == "grid":
        return torch.randint(0, 256, shape, dtype=torch.uint8)
    places = [torch.randint(low, low + n, (batch, steps)) for n, low in zip(field.sizes, field.lows)]
    return torch.stack(places, -1).reshape(shape)


def small_policy(**changes: object) -> Policy:
    mixer = ExpireSpanConfig(max_span=6, ramp=2, initial_span=0.5)
    config = dict(dim=16, layers=2, heads=2, ff_dim=16, observation=(FIELDS["choice"],), actions=(3,), mixer=mixer)
    return Policy(PolicyConfig.modern(**{**config, **changes}))


@pytest.mark.parametrize("name", FIELDS)
def test_every_form_of_observation_is_read(name):
    """Different observations give different vectors, and every weight gets a gradient."""
    field = FIELDS[name]
    encoder = ObservationEncoder([field], 16, 4)
    x = draw(field, 4, 5)
    y = encoder({name: x})
    assert y.shape == (4, 5, 16)
    assert len({tuple(v) for v in y.flatten(0, 1).tolist()}) == len(
        {tuple(v.flatten().tolist()) for v in x.flatten(0, 1)}
    )
    y.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in encoder.parameters())


def test_cells_that_hold_nothing_say_nothing_at_first():
    """Rooms, walls and what is unseen begin alike, so that a ball makes most of the difference between two observations."""
    torch.manual_seed(0)
    encoder = ObservationEncoder([ObservationField("image", "grid", (5, 5, 3))], 64, 16)
    blank = torch.tensor([[0, 0, 0], [1, 0, 0], [2, 5, 0]], dtype=torch.uint8)  # unseen, empty, a grey wall
    views = blank[torch.randint(0, 3, (8, 1, 5, 5))]
    with_ball = views.clone()
    with_ball[:, :, 1, 2] = torch.tensor([6, 1, 0], dtype=torch.uint8)
    plain, ball = (encoder({"image": x}).detach().flatten(0, 1) for x in (views, with_ball))
    assert torch.equal(plain, plain[:1].expand_as(plain)) and torch.equal(ball, ball[:1].expand_as(ball))
    # One cell of 25 moves the encoding by a third of its length or more; with random embeddings it is about a quarter.
    assert float((ball - plain)[0].norm() / plain[0].norm()) > 1 / 3
    encoder({"image": views})[:, :, :8].sum().backward()
    kinds = encoder.parts[0].embed[0].weight.grad  # type: ignore[union-attr, index]
    assert (kinds[:3].abs().sum(1) > 0).all() and not torch.allclose(kinds[0], kinds[1])  # they are learned, and apart


def test_the_largest_and_smallest_values_have_an_embedding():
    for name in ("choice", "choices", "words"):
        field = FIELDS[name]
        encoder = ObservationEncoder([field], 8, 4)
        for value in (field.lows, tuple(low + n - 1 for low, n in zip(field.lows, field.sizes))):
            x = encoder({name: torch.tensor(value).reshape(1, 1, *field.shape)})
            assert x.shape == (1, 1, 8) and x.isfinite().all()


def test_choices_are_independent_categoricals():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7)
    choices = Choices(logits, (4, 3))
    reference = [torch.distributions.Categorical(logits=part) for part in logits.split([4, 3], -1)]
    actions = choices.sample()
    assert actions.shape == (2, 3, 2)
    torch.testing.assert_close(
        choices.log_prob(actions), sum(d.log_prob(a) for d, a in zip(reference, actions.unbind(-1)))
    )
    torch.testing.assert_close(choices.entropy(), sum(d.entropy() for d in reference))
    torch.testing.assert_close(choices.likeliest(), torch.stack([d.probs.argmax(-1) for d in reference], -1))


def test_draws_follow_the_probabilities():
    torch.manual_seed(0)
    wanted = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = Choices(wanted.log().expand(20_000, 4), (4,)).sample()
    shares = torch.bincount(drawn[:, 0], minlength=4) / 20_000
    assert shares[1] == 0  # what is impossible is never drawn
    # Five standard deviations of a share over 20,000 draws are at most 0.018.
    assert (shares - wanted).abs().max() < 0.018


def test_at_first_all_actions_are_about_equally_likely():
    policy = small_policy()
    entropy = policy({"choice": draw(FIELDS["choice"], 8, 4)}).choices.entropy()
    assert entropy.min() > 0.99 * torch.tensor(3.0).log()


def test_streamed_equals_whole():
    """Steps one at a time, with real deletion, give what one block gives; memories did expire on the way."""
    torch.manual_seed(0)
    policy = small_policy().double().eval()
    x = draw(FIELDS["choice"], 3, 20)
    whole = policy({"choice": x}, keep="nothing")
    state, values = policy.initial_state(3), []
    for t in range(20):
        out = policy({"choice": x[:, t : t + 1]}, state)
        state, values = out.state, [*values, out.value]
    torch.testing.assert_close(torch.cat(values, 1), whole.value)
    assert all(part["memory"].living.max() < 20 for part in state)


def test_a_policy_needs_to_know_what_it_reads():
    with pytest.raises(ValueError, match="its observation and its actions, got 0 fields and 1 choices"):
        small_policy(observation=())
    with pytest.raises(ValueError, match="dropout of a policy must be 0"):
        small_policy(dropout=0.1)
