"""Every space that a Gymnasium environment may have: described, read, acted in, and resumed exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium")

import numpy as np
from gymnasium import spaces

from expire_span.extras import EXTRAS
from expire_span.models.actions import Both, Choices, Numbers
from expire_span.models.observations import ObservationEncoder
from expire_span.runs import RunError, RunFolder, UserError
from expire_span.settings.agent import EnvTask, ObservationField
from expire_span.train.actor_critic import AgentLearner, resume, train
from expire_span.train.build_environments import build_environments, decide_inputs
from expire_span.train.replay import replay
from expire_span.train.reward_scale import RewardScale
from expire_span.train.spaces import ActionLayout, describe_observations, squash, words_of
from tests.error_budget import reordered
from tests.tiny_agents import Echo, Nest, tiny_agent, train_whole_and_broken

pytestmark = pytest.mark.usefixtures("one_thread")
REAL = ("CartPole-v1", "Pendulum-v1", "Blackjack-v1", "FrozenLake-v1", "Taxi-v4", "MountainCarContinuous-v0")


# Descriptions


def test_observation_spaces_as_fields():
    shown = {
        "mission": spaces.Text(20),
        "picture": spaces.Box(0, 255, (84, 80, 3), np.uint8),
        "frames": spaces.Box(0, 255, (4, 84, 84), np.uint8),
        "grey": spaces.Box(0, 255, (30, 40), np.uint8),
        "cells": spaces.Box(0, 255, (7, 7, 3), np.uint8),
        "table": spaces.Box(0, 9, (5, 60), np.uint8),
        "inner": spaces.Tuple((spaces.Discrete(3), spaces.Dict({"x": spaces.MultiBinary(2)}))),
    }
    fields = {f.name: f for f in describe_observations(spaces.Dict(shown), words=9)}
    forms = {name: field.form for name, field in fields.items()}
    assert forms == {
        **dict(mission="text", picture="image", frames="image", grey="image", cells="grid", table="words"),
        **{"inner.0": "choices", "inner.1.x": "choices"},
    }
    assert fields["mission"].shape == (9,)
    with pytest.raises(UserError, match=r"must be Box, .* or Tuple, got Sequence"):
        describe_observations(spaces.Sequence(spaces.Discrete(2)))


def test_words_are_told_apart_and_too_many_are_refused():
    one, two = words_of("Go to the RED door, now", 8), words_of("go to the red door, now", 8)
    assert one == two and one[7:] == (0,) and len(set(one)) == 8
    names = {words_of(f"word{n}", 1) for n in range(5000)}
    assert len(names) >= 4980  # of a million hashes; that both halves are equal is seldom
    with pytest.raises(
        UserError, match=r"has 4 words, and task.text_words allows 3: 'a b c d'; give --task.text-words 4"
    ):
        words_of("a b c d", 3)


def test_action_spaces_are_laid_out_and_given_back():
    layout = ActionLayout.of(Nest.action_space, "Tiny/Nest-v0")
    assert layout.choices == (3, 2, 2, 2, 4, 6) and layout.bounded == (True, True)
    given = layout.give(np.array([[2, 1, 0, 1, 3, 5, 0.0, 20.0], [0, 0, 1, 0, 0, 0, -20.0, 0.0]], np.float32))
    assert given["go"].tolist() == [4, 2] and given["push"].reshape(2, 2).tolist() == [[1, 3], [-1, 1]]
    assert given["more"][0].tolist() == [[1, 0], [0, 1]] and given["more"][1].tolist() == [[1, 3], [0, 0]]
    assert given["more"][2].tolist() == [[5], [0]]
    for row in range(2):
        one = {"go": given["go"][row], "push": given["push"][row], "more": tuple(x[row] for x in given["more"])}
        assert Nest.action_space.contains(one)
    for wrong in (spaces.Text(3), spaces.Box(-1, 1, (0,)), spaces.Box(0, 10**6, (1,), np.int64)):
        with pytest.raises(UserError, match=r"actions must be Discrete, MultiDiscrete, .* of Some-v0"):
            ActionLayout.of(wrong, "Some-v0")


def test_numbers_stay_in_their_range():
    low, high = np.array([-2, 0, -np.inf]), np.array([2, np.inf, np.inf])
    u = np.array([[-50, -50, -50], [0, 0.5, 0], [50, 50, 50]], np.float32)
    assert squash(u, low, high).tolist() == [[-2, 0, -50], [0, 0.5, 0], [2, 50, 50]]


# Distributions


def test_numbers_against_torch():
    torch.manual_seed(0)
    mean, log_std = torch.randn(5, 3), torch.tensor([-1.0, 0.0, 0.5])
    got, wanted = Numbers(mean, log_std, [False] * 3), torch.distributions.Normal(mean, log_std.exp())
    u = torch.randn(5, 3)
    assert_near(got.log_prob(u), wanted.log_prob(u).sum(-1))
    assert_near(got.entropy(), wanted.entropy().sum(-1))
    drawn = Numbers(mean.expand(20_000, 5, 3), log_std, [False] * 3).sample()
    five = 5 / math.sqrt(20_000)  # five standard errors
    assert ((drawn.mean(0) - mean).abs() < five * log_std.exp()).all()
    assert ((drawn.std(0) / log_std.exp() - 1).abs() < five).all()


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    budget = reordered(8, size=float(wanted.abs().max()) + 4)
    torch.testing.assert_close(got, wanted, rtol=0, atol=budget)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.0, -0.3), (1.5, -0.5)])
def test_the_entropy_of_squashed_numbers_is_their_integral(mean, log_std):
    """Against -int p(a) log p(a) da on a fine grid, to a thousandth of a nat: what quadrature with sixteen nodes leaves."""
    a = torch.linspace(-1, 1, 2_000_001, dtype=torch.float64)[1:-1]
    u, std = torch.atanh(a), math.exp(log_std)
    log_p = -0.5 * ((u - mean) / std).square() - log_std - 0.5 * math.log(2 * math.pi) - torch.log1p(-a.square())
    wanted = -(log_p.exp() * log_p).sum() * (a[1] - a[0])
    got = Numbers(torch.tensor([mean]), torch.tensor([log_std]), [True]).entropy()
    assert abs(float(got) - float(wanted)) < 1e-3


def test_choices_and_numbers_together():
    torch.manual_seed(0)
    choices, numbers = Choices(torch.randn(4, 5), (2, 3)), Numbers(torch.randn(4, 2), torch.zeros(2), [True, False])
    both = Both(choices, numbers)
    actions = both.sample()
    assert actions.shape == (4, 4) and both.likeliest().shape == (4, 4)
    assert_near(both.log_prob(actions), choices.log_prob(actions[:, :2].long()) + numbers.log_prob(actions[:, 2:]))
    assert_near(both.entropy(), choices.entropy() + numbers.entropy())


# Encoders


def test_a_text_is_read_in_order_and_apart_from_its_padding():
    torch.manual_seed(0)
    encoder = ObservationEncoder((ObservationField("value", "text", (6,)),), 8)
    read = lambda text: encoder({"value": torch.tensor(words_of(text, 6)).expand(1, 1, 6)})  # noqa: E731
    assert not torch.equal(read("the red door"), read("door red the"))
    assert not torch.equal(read("the red door"), read("the blue door"))
    empty = torch.zeros(1, 1, 8)
    torch.testing.assert_close(encoder.parts[0](torch.zeros(1, 1, 6)), empty + encoder.parts[0].map.bias)


@pytest.mark.parametrize("shape", [(84, 84, 3), (4, 40, 33), (17, 40)])
def test_pictures_are_read_whole(shape):
    """Every corner of a picture changes what is read, with channels first, last or none."""
    torch.manual_seed(0)
    part = ObservationEncoder((ObservationField("value", "image", shape),), 8)
    picture = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    seen = part({"value": picture})
    assert seen.shape == (2, 3, 8)
    rolled = part({"value": picture.roll(1, 1)})
    torch.testing.assert_close(rolled, seen.roll(1, 1))
    for corner in (tuple(0 for _ in shape), tuple(n - 1 for n in shape)):
        changed = picture.clone()
        changed[(0, 0, *corner)] ^= 255
        assert not torch.equal(part({"value": changed})[0, 0], seen[0, 0])


def test_normalised_numbers_have_mean_zero_and_spread_one():
    torch.manual_seed(0)
    field = ObservationField("value", "numbers", (2,))
    encoder = ObservationEncoder((field,), 8, normalise=True)
    part = encoder.parts[0]
    blocks = [torch.randn(5, 4, 2) * torch.tensor([0.01, 30]) + torch.tensor([100, -7]) for _ in range(3)]
    before = encoder({"value": blocks[0]})
    for block in blocks:
        encoder.note({"value": block})
    whole = torch.cat(blocks).flatten(0, 1).double()
    torch.testing.assert_close(part.mean.double(), whole.mean(0), rtol=1e-5, atol=1e-5)
    # A spread of 0.01 around 100 is a ten-thousandth, of which float32 keeps three digits.
    torch.testing.assert_close(part.spread.double(), whole.var(0, correction=0), rtol=1e-2, atol=0)
    assert not torch.equal(before, encoder({"value": blocks[0]}))
    assert float(part.count) == 60


# Playing and learning


@pytest.mark.parametrize("env", ["Tiny/Nest-v0", "Tiny/Torque-v0", *REAL])
def test_replay_equals_rollout_in_every_space(env):
    task = {"previous_action": True, "previous_reward": True}
    config = tiny_agent(env, task, window=8, scale_rewards=True)
    learner = AgentLearner(replace(config, model=replace(config.model, normalise=True)))
    for index in range(2):
        learner.step(index)
    window = learner.player.play(8, gamma=0.9, gae_lambda=0.8).window
    out = replay(learner.trained, window)
    for name in ("log_prob", "value"):
        played = getattr(window, name).flatten()[out.index]
        assert (getattr(out, name) - played).abs().max() < 1e-5, name
    assert {"previous_reward"} < set(window.observation)


@pytest.mark.parametrize("env", ["Tiny/Nest-v0", "Tiny/Torque-v0"])
def test_a_broken_run_goes_on_exactly(tmp_path, monkeypatch, env):
    """With continuous actions, texts, pictures, scaled rewards and normalised numbers."""
    options = dict(steps=4, eval_every=4, eval_episodes=4, test_episodes=4, scale_rewards=True)
    config = tiny_agent(env, {"previous_action": True, "previous_reward": True}, **options)
    config = replace(config, model=replace(config.model, normalise=True))
    train_whole_and_broken(config, tmp_path, monkeypatch)


@pytest.mark.parametrize("env", ["Tiny/Nest-v0", "Tiny/Torque-v0"])
def test_environments_of_every_space_go_on_where_they_stood(env):
    task = EnvTask(env=env, previous_action=True, previous_reward=True)
    one, two = (build_environments(task, 3) for _ in range(2))
    one.begin(3)
    torch.manual_seed(0)
    draw = lambda: torch.cat([torch.zeros(3, len(one.actions)), torch.randn(3, len(one.continuous))], 1)  # noqa: E731
    for _ in range(6):
        one.step(draw())
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(7):
        assert one.observation.keys() == two.observation.keys()
        for name, x in one.observation.items():
            assert torch.equal(x, two.observation[name]), name
        actions = draw()
        a, b = one.step(actions), two.step(actions)
        assert torch.equal(a.reward, b.reward) and torch.equal(a.ended, b.ended)


def test_what_the_agent_sees_of_its_last_step():
    envs = build_environments(EnvTask(env="Tiny/Torque-v0", previous_action=True, previous_reward=True), 2)
    envs.begin(0)
    assert envs.observation["previous_numbers"].tolist() == [[0, 0]] * 2
    out = envs.step(torch.tensor([[1.0, -1.0], [0.0, 3.0]]))
    torch.testing.assert_close(envs.observation["previous_numbers"], torch.tensor([[1.0, -1.0], [0.0, 3.0]]).tanh())
    assert torch.equal(envs.observation["previous_reward"], out.reward)
    for _ in range(4):
        out = envs.step(torch.ones(2, 2))
    assert bool(out.truncated.all()) and not envs.observation["previous_reward"].any()
    assert out.final is not None and torch.equal(out.final["previous_reward"], out.reward)


def test_inputs_are_decided_by_the_environment_and_the_reason_is_told():
    shown, why = decide_inputs(EnvTask(env="popgym:popgym-BattleshipEasy-v0"))
    assert shown.previous_action and "popgym's own baselines" in why
    hidden, why = decide_inputs(EnvTask(env="CartPole-v1"))
    assert hidden.previous_action is False and "must remember by its memory" in why
    assert decide_inputs(EnvTask(env="CartPole-v1", previous_action=True))[1] == ""
    learner = AgentLearner(tiny_agent())
    assert learner.config.task.previous_action is False and len(learner.notes) == 1


def test_an_environment_that_changed_since_the_training_is_refused():
    learner = AgentLearner(tiny_agent())
    assert AgentLearner(learner.config).config == learner.config
    other = replace(learner.config, task=replace(learner.config.task, previous_action=True))
    with pytest.raises(UserError, match="the observations of environment Tiny/Echo-v0 have changed: trained with"):
        AgentLearner(other)


def test_rewards_are_scaled_by_the_spread_of_the_discounted_return():
    torch.manual_seed(0)
    reward, ended, gamma = torch.randn(40, 3) * 50 + 8, torch.rand(40, 3) < 0.1, 0.9
    scale = RewardScale(3, torch.device("cpu"))
    assert scale.factor == 1.0
    for part in (slice(0, 15), slice(15, 40)):
        scale.update(reward[part], ended[part], gamma)
    returns = []
    for row in range(3):
        g = 0.0
        for r, over in zip(reward[:, row].tolist(), ended[:, row].tolist()):
            g = gamma * g + r
            returns.append(g)
            g = 0.0 if over else g
    assert abs(scale.factor * np.std(returns) - 1) < 1e-5
    assert float(scale.scaled(torch.tensor([1e9]))) == 10.0


def test_continuous_actions_are_learned():
    """Rewards a hundred times as large as usual, and a number that is shown once."""
    config = tiny_agent("Tiny/Torque-v0", steps=20, envs=32, window=5, lr=1e-2, epochs=4, scale_rewards=True)
    learner, returns = AgentLearner(replace(config, model=replace(config.model, layers=1))), []
    for index in range(20):
        learner.step(index)
        returns.append(learner.metrics()["return"])
    assert sum(returns[-4:]) / 4 > 0.9 * sum(returns[:2]) / 2, returns


# Environments of other packages


def test_minigrid_with_its_mission(tmp_path):
    """The mission is read beside the cells and the direction, and MiniGrid's agent plays, learns and is evaluated."""
    pytest.importorskip("minigrid")
    config = tiny_agent(
        "minigrid:MiniGrid-MemoryS7-v0", {"success_return": 0.01, "options": '{"max_steps": 12}'}, steps=2
    )
    learner = AgentLearner(config)
    assert {f.name: f.form for f in learner.config.model.observation} == {
        "direction": "choices",
        "image": "grid",
        "mission": "text",
    }
    words = words_of("go to the matching object at the end of the hallway", 32)
    assert learner.player.envs.observation["mission"][0].tolist() == list(words)
    run = train(config, tmp_path / "run", shown=False)
    assert run.read_result()["score_name"] == "success"


def test_babyai_tells_its_missions_apart():
    pytest.importorskip("minigrid")
    envs = build_environments(EnvTask(env="minigrid:BabyAI-GoToLocal-v0"), 8)
    envs.begin(0)
    assert len({tuple(row) for row in envs.observation["mission"].tolist()}) > 1


@pytest.mark.parametrize(
    "name", ["PositionOnlyPendulumEasy", "BattleshipEasy", "MineSweeperEasy", "MultiarmedBanditEasy"]
)
def test_popgym_is_played(name):
    pytest.importorskip("popgym")
    learner = AgentLearner(tiny_agent(f"popgym:popgym-{name}-v0"))
    assert any(f.name.startswith("previous_") for f in learner.config.model.observation)
    learner.step(0)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(EXTRAS, "no_such_world", "minigrid")
    with pytest.raises(UserError, match=r"needs the package no_such_world; install it with: .*minigrid"):
        build_environments(EnvTask(env="no_such_world:Maze-v0"), 1)


def test_environments_in_processes_of_their_own_are_read_and_given_up(tmp_path):
    """Texts and nested actions pass through the pipes; one that hangs is ended, and what had been learned can be resumed."""
    envs = build_environments(EnvTask(env="Tiny/Nest-v0", processes=True), 2)
    envs.begin(0)
    assert envs.observation["mission"].any()
    envs.step(torch.zeros(2, envs.width))
    envs.close()
    stuck = EnvTask(env="Tiny/Broken-v0", options='{"wrong": "hang"}', processes=True, patience=1.5)
    envs = build_environments(stuck, 2)
    envs.begin(0)
    with pytest.raises(RunError, match=r"has not answered for 1.5 s in step"):
        envs.step(torch.zeros(2, 1, dtype=torch.int64))
    assert not any(process.is_alive() for process in _ended(envs.vector.processes))


def _ended(processes):
    for process in processes:
        process.join(timeout=30)
    return processes


def test_a_run_whose_environment_crashed_is_resumed(tmp_path, monkeypatch):
    """An environment that raises once ends training with one sentence; resume continues from the newest checkpoint."""

    config, steps, real = tiny_agent(steps=6, checkpoint_every=2), [], Echo.step

    def step(self, action):
        steps.append(1)
        if len(steps) == 4 * 8 * 3 + 40:  # after the checkpoint of step 2 and the evaluation of step 3
            raise ConnectionError("the simulator went away")
        return real(self, action)

    whole = train(config, tmp_path / "whole", shown=False)
    monkeypatch.setattr(Echo, "step", step)
    with pytest.raises(UserError, match="Tiny/Echo-v0 failed in step with ConnectionError: the simulator went away"):
        train(config, tmp_path / "run", shown=False)
    monkeypatch.undo()
    run = resume(RunFolder.open(tmp_path / "run"), shown=False)
    assert (run.path / "metrics.jsonl").read_bytes() == (whole.path / "metrics.jsonl").read_bytes()
