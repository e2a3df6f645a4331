"""Credit: the weights of an advantage's two parts follow what of each depends on the action."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expire_span.models.actions import Both, Choices, Numbers
from expire_span.train.credit import FIRST, LEAST, CreditWeights, expected


def play(kind: str, seed: int, rows: int = 32, steps: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reward, advantage, features and score of two equally likely actions, the right one told by a feature. `kind` says which
    part depends on the action; the other is noise, as large."""
    draw = torch.Generator().manual_seed(seed)
    features = torch.randn(steps, rows, 4, generator=draw)
    actions = torch.randint(2, (steps, rows), generator=draw)
    right = torch.where(actions == (features[..., 0] > 0), 1.0, -1.0)
    noise = torch.randn(steps, rows, generator=draw)
    now, later = (right, noise) if kind == "now" else (noise, right)
    score = Choices(torch.zeros(steps, rows, 2), (2,)).score(actions.unsqueeze(-1))
    return now + 3, now + later, features, score


def test_what_is_later_weighs_as_much_as_it_depends_on_the_action():
    for kind, wanted in (("now", LEAST), ("later", 1.0)):
        credit = CreditWeights(torch.device("cpu"))
        for seed in range(FIRST + 5):
            credit.weigh(*play(kind, seed))
        assert float(credit.later) == pytest.approx(wanted)
        one, other = credit.shares if kind == "now" else credit.shares.flip(0)
        assert one > 0.9 and other < 0.4


def test_parts_of_equal_use_weigh_alike():
    """Both parts hold the right action: weights near 1. Until the weight is known, advantages stay as they are."""
    credit = CreditWeights(torch.device("cpu"))
    for seed in range(FIRST + 5):
        reward, _, features, score = play("now", seed)
        noise = torch.randn(reward.shape, generator=torch.Generator().manual_seed(seed + 1000))
        advantage = 2 * (reward - 3) + noise
        weighed = credit.weigh(reward + noise, advantage, features, score)
        if seed < FIRST - 1:
            torch.testing.assert_close(weighed, advantage)
    assert credit.later > 0.8


def test_no_rewards_leave_no_error():
    credit = CreditWeights(torch.device("cpu"))
    zero = torch.zeros(5, 3)
    for _ in range(FIRST + 2):
        assert not credit.weigh(zero, zero, torch.zeros(5, 3, 4), torch.zeros(5, 3, 2)).any()
    assert float(credit.later) == pytest.approx(LEAST)


def test_expected_rewards_are_a_linear_function_of_the_features():
    features = torch.randn(20, 6, 3, generator=torch.Generator().manual_seed(0))
    reward = 0.5 + features @ torch.tensor([1.0, -2.0, 0.3])
    assert (expected(reward, features) - reward).abs().max() < 0.02


def test_scores_are_gradients_of_log_probabilities():
    torch.manual_seed(0)
    logits, mean = torch.randn(4, 3, 5, requires_grad=True), torch.randn(4, 3, 2, requires_grad=True)
    choices, numbers = Choices(logits, (2, 3)), Numbers(mean, torch.tensor([0.3, -0.7]), (True, False))
    both = Both(choices, numbers)
    actions = both.sample().detach()
    given = torch.autograd.grad(both.log_prob(actions).sum(), (logits, mean))
    torch.testing.assert_close(both.score(actions), torch.cat(given, -1))
