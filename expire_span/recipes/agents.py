"""Recipes of agents: each is a function that returns an `AgentRunConfig`. Standard library only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.models.systems.sliding_window import SlidingWindowConfig
from expire_span.settings.agent import AgentTrainConfig, EnvTask, PolicyConfig
from expire_span.settings.run import AgentRunConfig
from expire_span.settings.train import BudgetConfig


def _policy(max_span: int, ramp: int = 16, initial_span: float = 0.9, **model: Any) -> PolicyConfig:
    # Spans start near their limit, since a cue that expires before it was used gets no gradient. The temperature keeps the
    # noise of policy gradients from changing spans by much.
    mixer = ExpireSpanConfig(max_span=max_span, ramp=ramp, initial_span=initial_span, span_loss="l1", temperature=8.0)
    usual = {"dim": 64, "layers": 1, "heads": 4, "ff_dim": 128, "qk_norm": False}
    return PolicyConfig.modern(**{**usual, **model}, mixer=mixer)


def agent() -> AgentRunConfig:
    """Any Gymnasium environment (--task.env ID, or module:ID), by PPO; one layer of 64, minutes on a CPU."""
    # The clock lets memories be addressed by their time, rotary positions by their age: by the clock alone RepeatPrevious is
    # learned much later. With windows of 32 steps in 64 environments and two batches, agents stayed at chance in MiniGrid's
    # memory tasks; with these settings they learn them. Where every answer is rewarded, as in CountRecall, predicted rewards
    # teach sooner than policy gradients alone.
    task = EnvTask(clock=True, joint_actions=256)
    model = replace(_policy(128, wide_choices=True), predict_rewards=True, guided=True)
    train = AgentTrainConfig(
        envs=32, window=128, epochs=4, minibatches=8, lr=5e-4, gamma=0.995, kl_limit=0.1, least_spread=0.01
    )
    return AgentRunConfig(task, model, train)


def agent_corridor_tiny() -> AgentRunConfig:
    """Corridor Easy by reinforcement: remember a colour for up to 20 steps; a minute or two on a CPU."""
    # At a rate of 3e-3, one run of six fell from 96% to chance after 20 updates and stayed there.
    train = AgentTrainConfig(steps=60, lr=2e-3, epochs=4, minibatches=2, decay_share=0.5, averaging=0.9, eval_every=10)
    return AgentRunConfig(EnvTask(env="ExpireSpan/Corridor-Easy-v0"), _policy(40, ramp=8, positions="none"), train)


def agent_corridor() -> AgentRunConfig:
    """Corridor Medium by reinforcement: remember a colour for up to 60 steps, and little else; minutes on a CPU."""
    # A window is longer than the cue must live. With shorter windows, the step at the door gives no gradient to the span of a
    # cue in an earlier window, and the span loss alone decides how long it lives.
    budget = BudgetConfig(live=17, initial_weight=2e-5, max_weight=4e-5, start_loss=0.05, patience_loss=0.05)
    train = AgentTrainConfig(steps=150, envs=32, window=96, epochs=4, minibatches=2, lr=2e-3, decay_share=0.8)
    train = replace(
        train, budget=budget, averaging=0.9, goal=0.97, eval_every=20, eval_episodes=960, test_episodes=3200
    )
    return AgentRunConfig(EnvTask(env="ExpireSpan/Corridor-Medium-v0"), _policy(96, positions="none"), train)


def agent_corridor_window() -> AgentRunConfig:
    """Control for agent_corridor: a window of 16 steps, which must be at chance where the cue lies further back."""
    base = agent_corridor()
    return replace(base, model=replace(base.model, mixer=SlidingWindowConfig(window=16)))


def agent_corridor_hard() -> AgentRunConfig:
    """Corridor Hard by imitation: four colours, shuffled doors, up to 200 steps; after a lesson of up to 10 cells."""
    budget = BudgetConfig(live=40, initial_weight=2e-5, max_weight=4e-5, start_loss=0.08, patience_loss=0.1)
    train = AgentTrainConfig(steps=60, imitate=60, envs=32, window=256, epochs=4, minibatches=4, lr=5e-4)
    train = replace(train, decay_share=0.8, budget=budget, averaging=0.9, goal=0.97)
    train = replace(train, eval_every=10, eval_episodes=512, test_episodes=4096)
    task = EnvTask(env="ExpireSpan/Corridor-Hard-v0")
    return AgentRunConfig(task, _policy(512, layers=2, positions="none"), train)


def agent_corridor_lesson() -> AgentRunConfig:
    """Corridors of up to 10 cells, by imitation."""
    # Four colours, and doors in a new order in each episode. The choice of a door is one step in six here, and one in a hundred
    # in Corridor Hard, where imitation and reinforcement both stayed at chance without this lesson.
    base = agent_corridor_hard()
    task = replace(base.task, options='{"max_length": 10}')
    train = replace(base.train, steps=90, imitate=90, expert_share=0.75, envs=64, window=32, lr=1e-3)
    return replace(base, task=task, train=replace(train, eval_every=30, test_episodes=1024))


def agent_tmaze_tiny() -> AgentRunConfig:
    """Endless T-Maze Easy by reinforcement: ten corridors of 3 to 8 cells, each with a cue of its own; minutes on a CPU."""
    # The cues of earlier corridors are remembered too, so the newest must be told from them, by rotary positions.
    train = AgentTrainConfig(steps=300, window=48, epochs=4, minibatches=2, lr=2e-3, averaging=0.9, eval_every=50)
    budget = BudgetConfig(live=5, initial_weight=2e-5, max_weight=1e-4, start_loss=0.1, patience_loss=0.1)
    train = replace(train, weigh_credit=True, least_spread=0.03, budget=budget)
    return AgentRunConfig(EnvTask(env="ExpireSpan/EndlessTMaze-Easy-v0"), _policy(24, ramp=4), train)


def agent_tmaze() -> AgentRunConfig:
    """Endless T-Maze Medium by reinforcement: ten corridors of 10 to 30 cells, with few memories; minutes on a CPU."""
    base = agent_tmaze_tiny()
    train = replace(base.train, steps=650, envs=32, window=96, budget=replace(base.train.budget, live=9))
    return AgentRunConfig(EnvTask(env="ExpireSpan/EndlessTMaze-Medium-v0"), _policy(48, ramp=8), train)


def agent_portal() -> AgentRunConfig:
    """Portal Medium: imitate the expert first, then reinforcement; one GPU."""
    # The effect of a door shows one step later, so memories of neighbouring steps must be told apart, by rotary positions.
    budget = BudgetConfig(live=80, initial_weight=2e-5, max_weight=2e-4, start_loss=0.05, patience_loss=0.08)
    train = AgentTrainConfig(steps=120, imitate=60, envs=256, window=64, epochs=4, minibatches=4, lr=1e-3)
    train = replace(train, decay_share=0.5, budget=budget, averaging=0.9, goal=0.97)
    train = replace(train, eval_every=20, eval_episodes=512, test_episodes=2048)
    return AgentRunConfig(
        EnvTask(env="ExpireSpan/Portal-Medium-v0"), _policy(640, dim=128, layers=2, ff_dim=256), train
    )


def agent_portal_tiny() -> AgentRunConfig:
    """Portal Easy by imitation: remember which of two doors was right in each of 4 rooms; minutes on a CPU."""
    base = agent_portal()
    budget = replace(base.train.budget, live=24, start_loss=0.1, patience_loss=0.1)
    train = replace(base.train, steps=60, imitate=60, envs=32, lr=2e-3, budget=budget)
    train = replace(train, eval_episodes=256, test_episodes=1024)
    return AgentRunConfig(EnvTask(env="ExpireSpan/Portal-Easy-v0"), _policy(256, layers=2), train)


def agent_repeat_first_tiny() -> AgentRunConfig:
    """popgym's RepeatFirst Easy: answer every step with the first card; minutes on a CPU."""
    # The observation has no first-step flag: rotary positions tell the oldest memory from the others.
    task = EnvTask(env="popgym:popgym-RepeatFirstEasy-v0", previous_action=False, success_return=0.95)
    return AgentRunConfig(task, _policy(128), AgentTrainConfig(lr=3e-3, epochs=4, minibatches=2, gamma=0.9))


def agent_repeat_first() -> AgentRunConfig:
    """popgym's RepeatFirst Medium: answer every step with the first of 416 cards."""
    # One layer had learned nothing after 160 updates: a second one can tell the memory that no other came before. As in
    # RepeatPrevious, an answer changes nothing later. At a rate of 3e-3 the return fell back again and again. With a tenth
    # of this entropy, two runs of three ended at 0.59 and 0.72.
    budget = BudgetConfig(live=60, initial_weight=1e-5, start_loss=0.1, patience_loss=0.1, rest=True)
    train = AgentTrainConfig(steps=400, window=52, epochs=4, minibatches=2, lr=1.5e-3, averaging=0.9, budget=budget)
    train = replace(train, gamma=0.1, gae_lambda=0.9, least_spread=0.01, entropy=0.03, eval_episodes=64)
    task = EnvTask(env="popgym:popgym-RepeatFirstMedium-v0", previous_action=False, success_return=0.95)
    return AgentRunConfig(task, _policy(512, ramp=32, initial_span=0.95, layers=2), train)


def agent_repeat_previous_tiny() -> AgentRunConfig:
    """popgym's RepeatPrevious Easy: answer with the card of three steps ago; minutes on a CPU."""
    budget = BudgetConfig(live=5, initial_weight=1e-4, start_loss=0.1, patience_loss=0.1)
    train = AgentTrainConfig(steps=150, epochs=4, minibatches=2, lr=3e-3, gamma=0.9, budget=budget)
    task = EnvTask(env="popgym:popgym-RepeatPreviousEasy-v0", previous_action=False, success_return=0.95)
    return AgentRunConfig(task, _policy(16, ramp=4), train)


def agent_repeat_previous() -> AgentRunConfig:
    """popgym's RepeatPrevious Medium: answer with the card of 31 steps ago."""
    # An answer is rewarded at once and changes nothing later, so later rewards are discounted strongly. Learned relative
    # positions learn to attend to one age among many sooner than rotary ones.
    train = AgentTrainConfig(steps=1500, window=52, epochs=4, minibatches=2, lr=3e-3, gamma=0.1, gae_lambda=0.9)
    train = replace(train, least_spread=0.01, entropy=0.003, eval_episodes=64)
    task = EnvTask(env="popgym:popgym-RepeatPreviousMedium-v0", previous_action=False, success_return=0.9)
    model = _policy(40, ramp=8, initial_span=0.95, positions="relative", relative_window=48)
    return AgentRunConfig(task, model, train)
