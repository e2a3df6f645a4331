"""Policies that predict the rewards of their actions, and are guided by them; episodes that do not all begin together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.models.policy import GUIDE, Policy
from expire_span.settings.agent import ObservationField, PolicyConfig
from expire_span.train.actor_critic import AgentLearner
from expire_span.train.optimizers import set_rates
from expire_span.train.replay import replay
from tests.tiny_agents import tiny_agent

pytestmark = pytest.mark.usefixtures("one_thread")
SEEN = (ObservationField("value", "numbers", (2,)),)


def build(**more: object) -> Policy:
    torch.manual_seed(0)
    usual = {"dim": 16, "layers": 1, "heads": 2, "ff_dim": 16, "observation": SEEN, "predict_rewards": True}
    return Policy(PolicyConfig.modern(**usual, **more))  # type: ignore[arg-type]


def test_a_predicted_reward_by_hand():
    """The sum of the number of each chosen value, of each slope times its squashed number, and of the last number."""
    policy = build(actions=(3, 2), continuous=(True, False))
    features = torch.randn(4, 5, 16)
    actions = torch.tensor([2.0, 1.0, 0.5, -3.0]).expand(4, 5, 4)
    given = policy.reward_head(features)  # type: ignore[misc]
    wanted = (
        given[..., 2] + given[..., 3 + 1] + given[..., 5] * torch.tensor(0.5).tanh() - 3 * given[..., 6] + given[..., 7]
    )
    torch.testing.assert_close(policy.predict_reward(features, actions), wanted)


def test_a_guided_policy_prefers_what_it_predicts_to_be_rewarded():
    """Nothing changes while the number is 0; the loss of the policy reaches this number and not the predictions."""
    plain, guided = build(actions=(3,)), build(actions=(3,), guided=True)
    guided.load_state_dict(plain.state_dict(), strict=False)
    x = {"value": torch.randn(2, 4, 2)}
    before, after = plain(x).choices.parts[0], guided(x).choices.parts[0]
    torch.testing.assert_close(after, before)
    with torch.no_grad():
        guided.guide.fill_(0.5)
        guided.reward_head.weight.zero_()  # type: ignore[union-attr]
        guided.reward_head.bias.copy_(torch.tensor([0.0, 0.0, 1.0, 0.0]))  # type: ignore[union-attr]
    shift = guided(x).choices.parts[0] - before
    torch.testing.assert_close(shift[..., 2] - shift[..., 0], torch.full((2, 4), 0.5 * GUIDE))
    guided(x).choices.parts[0][..., 2].sum().backward()
    assert guided.guide.grad != 0 and guided.reward_head.weight.grad is None  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="guided needs predict_rewards"):
        PolicyConfig.modern(guided=True)


@pytest.mark.parametrize("kind", ["expire_span", "sliding_window"])
def test_predictions_are_learned(kind):
    """The error of a window's predicted rewards falls, in whole windows and in fragments; without a head there are none."""
    from expire_span.models.systems import find

    config = tiny_agent(window=16, minibatches=2, epochs=1, lr=1e-2)
    mixer = config.model.mixer if kind == "expire_span" else find(kind).settings(**find(kind).example)
    config = replace(config, model=replace(config.model, mixer=mixer, predict_rewards=True, layers=1))
    learner = AgentLearner(config)
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    assert window.reward is not None and window.reward.std() == pytest.approx(1.0, abs=0.2)
    set_rates(learner.optimizers, 1.0)
    errors = [float(part["reward_loss"]) for _ in range(30) for part in learner._improve_all(window, torch.tensor(0.0))]
    assert sum(errors[-4:]) < 0.7 * sum(errors[:4])
    plain = AgentLearner(tiny_agent())
    assert replay(plain.trained, plain.player.play(8, gamma=0.9, gae_lambda=0.8).window).reward is None


def test_episodes_are_staggered():
    """Episodes of one length begin together, unless each row's first one is cut off at another step."""
    begun = []
    for stagger in (False, True):
        task = {"options": '{"longest": 100000, "limit": 11}'}
        learner = AgentLearner(tiny_agent(task=task, stagger=stagger))
        played = [learner.player.play(8, gamma=0.9, gae_lambda=0.8).window.begins for _ in range(12)]
        begun.append({tuple(row.nonzero().flatten().tolist()) for row in torch.cat(played)[40:].t()})
    assert len(begun[0]) == 1 and len(begun[1]) == 4
