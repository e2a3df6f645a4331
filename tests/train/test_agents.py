"""Agents: what is replayed equals what was played, advantages and resumed runs are exact, bad input is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("gymnasium")

from expire_span.checkpoint import load_policy
from expire_span.models.systems import SYSTEMS, find
from expire_span.runs import UserError
from expire_span.settings.agent import EnvTask
from expire_span.train import actor_critic
from expire_span.train.actor_critic import AgentLearner, train
from expire_span.train.build_environments import build_environments
from expire_span.train.replay import cut, replay
from expire_span.train.rollout import advantages
from tests.error_budget import DOUBLE, reordered
from tests.tiny_agents import CORRIDOR, MIXER, play_twice, tiny_agent, train_whole_and_broken, with_mixer

EXACT = [kind for kind, system in SYSTEMS.items() if system.streaming.startswith("exact")]


pytestmark = pytest.mark.usefixtures("one_thread")


# What is replayed equals what was played


@pytest.mark.parametrize("kind, env", [(kind, "Tiny/Echo-v0") for kind in EXACT] + [("expire_span", CORRIDOR)])
def test_replay_equals_rollout(kind, env):
    """Log-probabilities and values to 1e-5, in windows in which episodes end and begin."""
    mixer = MIXER if kind == "expire_span" else find(kind).settings(**find(kind).example)
    task = {"options": '{"max_length": 3}'} if env == CORRIDOR else {}
    learner = play_twice(with_mixer(tiny_agent(env, task, window=16), mixer))
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    stretches = cut(window.begins)
    assert 0 < int(stretches.goes_on.sum()) < len(stretches.row)
    learner.trained.train()
    out = replay(learner.trained, window)
    assert sorted(out.index.tolist()) == list(range(window.begins.numel()))  # every step once
    for name in ("log_prob", "value"):
        played = getattr(window, name).flatten()[out.index]
        assert (getattr(out, name) - played).abs().max() < 1e-5, name
    assert window.log_prob.std() > 0.01


def test_memories_die_inside_the_replayed_window():
    """Otherwise the test above would show nothing about deletion."""
    learner = play_twice(tiny_agent(CORRIDOR, window=16))
    before = learner.player.state[0]["memory"]
    played = learner.player.play(16, gamma=0.9, gae_lambda=0.8)
    assert before.pos.shape[1] > 0 and float(played.live.max()) < 8 + 1


def test_windows_are_cut_where_episodes_begin():
    """Row 0 goes on and begins anew at steps 2 and 3, row 1 goes on throughout, row 2 begins with the window."""
    begins = torch.tensor([[0, 0, 1], [0, 0, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    found = cut(begins)
    told = list(zip(*(getattr(found, name).tolist() for name in ("row", "first", "length", "goes_on"))))
    assert told == [(0, 0, 2, True), (0, 2, 1, False), (0, 3, 1, False), (1, 0, 4, True), (2, 0, 4, False)]


def test_fragments_do_not_see_across_an_episodes_end():
    """Other observations before an episode's beginning change nothing after it."""
    learner = play_twice(tiny_agent(window=16))
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    found = cut(window.begins)
    inner = found.take(~found.goes_on & (found.first > 0))
    row, first = int(inner.row[0]), int(inner.first[0])
    out = replay(learner.trained, window)
    changed = {name: x.clone() for name, x in window.observation.items()}
    changed["clock"][:first, row] += 3
    other = replay(learner.trained, replace(window, observation=changed))
    time, rows = out.index // window.rows, out.index % window.rows
    after = (rows != row) | (time >= first)
    assert torch.equal(out.value[after], other.value[after])
    assert not torch.equal(out.value[~after], other.value[~after])


def test_spans_are_priced_without_padding():
    """The span loss is the mean span of the window's steps, without the fragments' padding, and it has a gradient."""
    learner = play_twice(tiny_agent(window=16))
    window = learner.player.play(16, gamma=0.9, gae_lambda=0.8).window
    learner.trained.double()
    out = replay(learner.trained, window)
    singles = [replay(learner.trained, window.take([row])).span for row in range(window.rows)]
    torch.testing.assert_close(torch.cat(singles).mean(), out.span.mean(), rtol=0, atol=DOUBLE)
    out.span.mean().backward()
    assert all(block.mixer.span_predictor.bias.grad.abs() > 0 for block in learner.trained.layers())


# Advantages


def test_advantages_equal_their_sum():
    """Against the definition as a double sum, with episodes that end."""
    torch.manual_seed(0)
    steps, rows, gamma, lam = 9, 5, 0.9, 0.7
    reward, value, last = torch.randn(steps, rows), torch.randn(steps, rows), torch.randn(rows)
    ended = torch.rand(steps, rows) < 0.25
    got = advantages(reward, value, ended, last, gamma, lam)
    beyond = torch.cat([value[1:], last[None]]) * (~ended)
    delta = reward + gamma * beyond - value
    for b in range(rows):
        for t in range(steps):
            total, weight = 0.0, 1.0
            for k in range(t, steps):
                total, weight = total + weight * delta[k, b], weight * gamma * lam
                if ended[k, b]:
                    break
            torch.testing.assert_close(got[t, b], total)


def test_truncated_episodes_count_the_value_of_their_final_state():
    """With a constant value head, the reward at a truncation is raised by gamma times that value; at termination it is not."""
    learner = AgentLearner(tiny_agent(window=24))
    with torch.no_grad():
        learner.trained.value_head.weight.zero_()
        learner.trained.value_head.bias.fill_(2.0)
    seen = []
    real = learner.player.envs.step
    learner.player.envs.step = lambda *asked: seen.append(real(*asked)) or seen[-1]
    window = learner.player.play(24, gamma=0.5, gae_lambda=0.0).window
    for t, frame in enumerate(seen):
        raised = torch.where(frame.terminated, 0.0, 0.5 * 2.0)  # cut off or going on: the value beyond counts
        torch.testing.assert_close(window.target[t], frame.reward + raised)
    assert any(f.truncated.any() for f in seen) and any(f.terminated.any() for f in seen)


# One update


def test_the_surrogate_by_hand():
    """A ratio beyond the clipping range does not improve the objective further, but a worse one always counts."""
    improver = AgentLearner(tiny_agent(clip_ratio=0.2)).model
    advantage = torch.tensor([1.0, 1.0, -1.0, -1.0])
    ratio = torch.tensor([1.5, 0.5, 1.5, 0.5])
    loss, more = improver._surrogate(ratio.log(), advantage)
    scaled = advantage / advantage.std()
    torch.testing.assert_close(loss, -(torch.tensor([1.2, 0.5, 1.5, 0.8]) * scaled).mean())
    assert more["clipped"] == 1


def test_the_loss_by_hand():
    """Entropy lowers it; the value's error and the spans raise it, each by its weight."""
    learner = play_twice(tiny_agent(value_weight=0.3, entropy=0.2))
    window = learner.player.play(8, gamma=0.9, gae_lambda=0.8).window
    loss, parts = learner.model(window, None, torch.tensor(0.7))
    want = parts["policy_loss"] + 0.3 * parts["value_loss"] - 0.2 * parts["entropy"] + 0.7 * parts["span_loss"]
    torch.testing.assert_close(loss.detach(), want)
    assert parts["entropy"] > 0.1 and parts["span_loss"] > 0.1 and parts["value_loss"] > 0


def test_noise_is_not_blown_up():
    """Advantages that hardly differ give a loss as small as they are."""
    improver = AgentLearner(tiny_agent()).model
    noise = 1e-3 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss, _ = improver._surrogate(torch.tensor([0.1, 0.0, 0.1, 0.0]), noise)
    assert 0 < -float(loss) < 1e-3


def test_learning_stops_once_the_policy_has_moved_far(monkeypatch):
    counts = {}
    for limit in (1e-9, 1e9):
        learner, calls = AgentLearner(tiny_agent(kl_limit=limit, epochs=3, minibatches=2, lr=1e-2)), []
        real = learner._improve
        learner._improve = lambda *a, real=real, calls=calls: calls.append(1) or real(*a)
        learner.step(0)
        counts[limit] = len(calls)
    assert counts == {1e-9: 2, 1e9: 6}


# Whole runs


@pytest.mark.parametrize("env", ["Tiny/Echo-v0", CORRIDOR])
def test_a_crash_changes_nothing(tmp_path, monkeypatch, env):
    """A run that is broken after any step and resumed ends with the unbroken run's bytes."""
    budget = replace(tiny_agent().train.budget, live=3.0, gain=0.2, start_loss=0.9)
    options = dict(steps=5, minibatches=2, budget=budget, imitate=2, eval_every=5, eval_episodes=4, test_episodes=4)
    options["averaging"], options["stagger"] = 0.5, True
    monkeypatch.setattr("expire_span.train.credit.FIRST", 1)
    monkeypatch.setattr("expire_span.train.credit.NOTABLE", 10.0)  # so that what is later weighs less
    options["weigh_credit"] = True
    task = {"previous_action": True, "success_return": 0.5, "clock": True, "joint_actions": 6}
    task["options"] = '{"max_length": 3}' if env == CORRIDOR else '{"multi": true}'
    config = tiny_agent(env, task, **options)
    config = replace(config, model=replace(config.model, predict_rewards=True, guided=True))
    whole = train_whole_and_broken(config, tmp_path, monkeypatch)
    lines = whole.read_metrics()
    assert all(line["reward_loss"] > 0 for line in lines if line["split"] == "train")
    assert "imitation_loss" in lines[0] and "policy_loss" in lines[2]
    assert any(line.get("later_credit", 1.0) != 1.0 for line in lines)


def test_environments_go_on_where_they_stood():
    """Rows at different steps of their episodes, restored by replaying their actions, continue exactly as before."""
    task = EnvTask(env="Tiny/Echo-v0", options='{"longest": 30, "limit": 20, "tells": true}', previous_action=True)
    one, two = (build_environments(task, 5) for _ in range(2))
    one.begin(3)
    torch.manual_seed(0)
    for _ in range(33):
        one.step(torch.randint(0, 3, (5, 1)))
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(40):
        for name, x in one.observation.items():
            assert torch.equal(x, two.observation[name]), name
        actions = torch.randint(0, 3, (5, 1))
        a, b = one.step(actions), two.step(actions)
        assert torch.equal(a.reward, b.reward) and torch.equal(a.ended, b.ended)
        assert torch.equal(a.success, b.success) and not bool(a.success.isnan().any())  # one was reported before


@pytest.mark.parametrize(("success_return", "best"), [(None, 0.7), (0.5, 0.4)])
def test_the_best_weights_are_kept(tmp_path, monkeypatch, success_return, best):
    """The goal counts first, then memories above the target; what an evaluation of the run plays are those weights. Where
    success is a threshold of the return, the return decides until the goal is reached."""
    rank = lambda score, live, progress=None: actor_critic.rank_weights(  # noqa: E731
        score, score if progress is None else progress, live, goal=0.95, target=16.0
    )
    assert rank(0.5, 5.0) < rank(0.9, 5.0) < rank(0.95, 90.0) < rank(0.99, 30.0) < rank(0.96, 20.0) < rank(0.95, 16.0)
    assert rank(0.96, 12.0) < rank(0.97, 15.0) == rank(0.97, 16.0)
    assert rank(0.6, 5.0, 0.3) < rank(0.4, 5.0, 0.9) < rank(0.2, 5.0, 120.0) < rank(0.1, 5.0, 150.0) < rank(0.95, 90.0)
    scores, returns = iter([0.2, 0.7, 0.4, 0.5]), iter([0.1, 0.3, 0.9, 0.2])
    real = AgentLearner._score
    fake = lambda self, split, n: replace(  # noqa: E731
        real(self, split, n), score=next(scores, 0.0), mean_return=next(returns, 0.0)
    )
    monkeypatch.setattr(AgentLearner, "_score", fake)
    kept = {}

    def note(self, result):
        keep(self, result)
        kept.setdefault(result.score, self.trained.value_head.bias.clone())

    keep = AgentLearner._keep_best
    monkeypatch.setattr(AgentLearner, "_keep_best", note)
    config = tiny_agent(task={"success_return": success_return}, steps=8, eval_every=2)
    run = train(config, tmp_path / "run", shown=False)
    assert torch.equal(load_policy(run).value_head.bias, kept[best])
    assert not torch.equal(kept[0.7], kept[0.4])


def test_evaluations_use_the_mean_of_the_weights(tmp_path, monkeypatch):
    """What is evaluated and kept is the running mean over updates; the agent goes on with its own weights, after errors too."""
    config = tiny_agent(steps=3, eval_every=3, averaging=0.75)
    newest, real = [], AgentLearner.step
    note = lambda self, index: (real(self, index), newest.append(self.trained.value_head.bias.detach().clone()))[0]  # noqa: E731
    monkeypatch.setattr(AgentLearner, "step", note)
    run = train(config, tmp_path / "run", shown=False)
    wanted = newest[0]
    for bias in newest[1:]:
        wanted = 0.75 * wanted + 0.25 * bias
    rounding = reordered(3, size=float(wanted.abs().max()))
    torch.testing.assert_close(load_policy(run).value_head.bias.detach(), wanted, rtol=0, atol=rounding)
    assert not torch.equal(wanted, newest[-1])
    learner = AgentLearner(config)
    learner.average.weights = {name: x + 1 for name, x in learner.trained.state_dict().items()}
    before = learner.trained.value_head.bias.detach().clone()
    with pytest.raises(KeyboardInterrupt), learner.average.in_place_of(learner.trained):
        assert torch.equal(learner.trained.value_head.bias, before + 1)
        raise KeyboardInterrupt
    assert torch.equal(learner.trained.value_head.bias, before)


def test_an_agent_starts_from_the_best_weights_of_another_run(tmp_path):
    first = train(tiny_agent(steps=6, eval_every=2), tmp_path / "first", shown=False)
    second = train(replace(tiny_agent(steps=1, lr=1e-9), seed=3), tmp_path / "second", init_from=first, shown=False)
    assert second.origin == {"run": str(first.path), "step": 6}
    wanted = load_policy(first).state_dict()
    torch.testing.assert_close(load_policy(second).state_dict(), wanted, rtol=0, atol=1e-6)
    other = replace(tiny_agent(), model=replace(tiny_agent().model, dim=32))
    with pytest.raises(UserError, match=r"weight \S+ of run .*first has the shape"):
        train(other, tmp_path / "third", init_from=first, shown=False)
    assert not (tmp_path / "third").exists()


def test_multidiscrete_actions_and_every_epoch_of_minibatches(tmp_path):
    config = tiny_agent(task={"options": '{"multi": true}'}, steps=2, minibatches=2, epochs=3)
    run = train(config, tmp_path / "run", shown=False)
    assert run.config.model.actions == (3, 2)
    assert run.read_result()["score_name"] == "return"
