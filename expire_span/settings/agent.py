"""Settings of agents: the environment, the policy, how it learns. Standard library only."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from expire_span.checks import Count, Natural, NonNegative, Positive, Share, ShareBelowOne, checked, require
from expire_span.field_docs import documented
from expire_span.settings.models import BackboneConfig
from expire_span.settings.train import BudgetConfig, LearningConfig


@documented
@dataclass(frozen=True)
@checked
class ObservationField:
    """The description of one part of an observation, from which a policy builds its encoder."""

    name: str
    """Its key in the observation; nested keys are joined by dots, and an observation without keys has the name "value"."""
    form: Literal["numbers", "choices", "words", "grid", "text", "image"]
    """numbers: real numbers; choices: integers with a range per place; words: integers of one common range; grid: cells in
    MiniGrid's encoding; text: hashes of the words of a sentence; image: pixels of one to four channels."""
    shape: tuple[int, ...]
    """Shape of one observation."""
    sizes: tuple[int, ...] = ()
    """For choices and words, the number of values of each place."""
    lows: tuple[int, ...] = ()
    """For choices and words, the smallest value of each place; empty means 0."""

    @property
    def places(self) -> int:
        """Number of values in one observation."""
        return math.prod(self.shape)


@documented
@dataclass(frozen=True)
@checked
class EnvTask:
    """Act in an environment, so that its rewards add up."""

    kind: Literal["env"] = "env"
    env: str = ""
    """Id of a Gymnasium environment, like ExpireSpan/Corridor-Easy-v0; module:Id imports a module first, which registers it."""
    options: str = "{}"
    """Arguments of the environment as JSON, like '{"recue_prob": 0.5}'."""
    previous_action: bool | None = None
    """Show the agent its last action, in which it could also store what it must remember. None decides by the environment, and
    training says why: popgym's are shown, as in its own baselines, others not."""
    previous_reward: bool = False
    """Show the agent the reward of its last step, as bandits and other tasks of learning within an episode need."""
    clock: bool = False
    """Show the agent how many steps its episode has lasted, as sines and cosines: what is still to come, and so the value of a
    state, often depends on it, and memories can be addressed by when they were made."""
    joint_actions: Count = 1
    """Where an action is several choices with at most this many combinations, make them as one choice among all combinations,
    so that one may depend on another. 1 makes them independently of each other."""
    text_words: Count = 32
    """Most words of a text in an observation, such as MiniGrid's mission."""
    patience: Positive = 300.0
    """Seconds that the environments may take for one step or reset; then training ends with an error and can be resumed."""
    success_return: float | None = None
    """Where the environment does not report success itself: an episode with at least this return is one. Until `train.goal` is
    reached, weights with a higher mean return then count as better."""
    processes: bool = False
    """Step every environment in a process of its own, which pays where a step takes more than a millisecond."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.arguments, dict), f"task.options must be a JSON table of arguments, got {self.options!r}"
        )

    @property
    def arguments(self) -> dict[str, Any]:
        """The environment's arguments."""
        try:
            return json.loads(self.options)
        except ValueError as error:
            raise ValueError(f"task.options must be a JSON table of arguments, got {self.options!r}") from error


@documented
@dataclass(frozen=True)
@checked
class PolicyConfig(BackboneConfig):
    """Observations in, actions and values out: encoder, backbone, two heads."""

    observation: tuple[ObservationField, ...] = ()
    """What the policy reads; filled in from the environment."""
    actions: tuple[int, ...] = ()
    """Number of values of each choice of an action; filled in from the environment."""
    continuous: tuple[bool, ...] = ()
    """For each continuous number of an action, whether its range is bounded; filled in from the environment."""
    cell_dim: Count = 16
    """Width of the embedding of a grid's cell, or of a word."""
    wide_choices: bool = False
    """Give choices among more than `cell_dim` values an embedding as wide as the model, so that a mean of memories tells which
    of them it holds."""
    normalise: bool = False
    """Shift and scale the numbers of observations by their running mean and standard deviation."""
    predict_rewards: bool = False
    """Give the policy a head that predicts the reward of the action taken, so that what tells it is found sooner than by
    policy gradients alone; `train.reward_weight` is the weight of its error."""
    guided: bool = False
    """Add the predicted rewards of the choices to their logits, times a learned number that begins at 0; needs
    `predict_rewards`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.predict_rewards or not self.guided, "guided needs predict_rewards, got guided without it")
        for name in ("dropout", "layer_drop"):
            why = "since replayed steps must give the probabilities that were acted on"
            require(getattr(self, name) == 0, f"{name} of a policy must be 0, {why}, got {getattr(self, name)}")


@documented
@dataclass(frozen=True)
class AgentTrainConfig(LearningConfig):
    """How an agent learns: PPO with generalised advantages, or imitation of an expert."""

    steps: Count = 300
    """Updates. Each plays `window` steps in every environment and learns from them."""
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.999)
    """Adam's running-mean factors."""
    clip: NonNegative = 0.5
    """Largest gradient norm; 0 switches clipping off."""
    warmup: Natural = 10
    """Updates of linear warm-up."""
    schedule: Literal["cosine", "constant", "linear"] = "linear"
    """Learning rate after the warm-up: down to final_lr along a cosine or a line, or constant."""
    span_weight: NonNegative = 0.0
    """Fixed weight of the mean span of new memories, used when no budget is set."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Budget controller; replaces span_weight when its target is set. Its losses are shares of failed episodes here."""
    eval_every: Count = 50
    """Updates between evaluations; the last update always has one."""
    checkpoint_every: Count = 100
    """Updates between checkpoints; the last update always has one."""
    envs: Count = 64
    """Environments side by side, over all processes together."""
    window: Count = 32
    """Steps between two updates, replayed from one stored state as one block: the horizon of the gradient."""
    epochs: Count = 2
    """Number of passes over each window."""
    minibatches: Count = 1
    """Optimizer steps per epoch, each on a part of the environments."""
    gamma: Share = 0.99
    """Discount of rewards per step."""
    gae_lambda: Share = 0.95
    """Lambda of generalised advantage estimation: 0 is one-step advantages, 1 those of whole returns."""
    clip_ratio: Positive = 0.2
    """Clipping range of PPO: relative change of an action's probability beyond which the objective no longer improves."""
    kl_limit: Positive = 0.02
    """Stop learning from a window once an epoch has changed the policy by this much (Kullback-Leibler divergence, nats)."""
    least_spread: Positive = 0.1
    """Smallest standard deviation by which advantages are divided: those of an agent that always succeeds are noise, which
    would undo what was learned if it were scaled up. Environments with small rewards need a smaller value."""
    entropy: NonNegative = 0.01
    """Weight of the entropy bonus, which keeps the agent exploring."""
    anneal_entropy: bool = False
    """Lower that weight with the learning rate, so that the agent explores at first and does what it knows at the end."""
    value_weight: NonNegative = 0.5
    """Weight of the value's squared error."""
    reward_weight: NonNegative = 0.5
    """Weight of the squared error of predicted rewards, in units of their variance; used with `model.predict_rewards`."""
    scale_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted return, so that their unit does not matter."""
    stagger: bool = False
    """Cut the first episode of each environment off at another step of the first window, so that episodes of the same length
    do not all begin together and every window shows all parts of one."""
    weigh_credit: bool = False
    """Weight the two parts of an advantage, the reward of the step itself and all that is later, by how much of each is seen to
    depend on the action. Where actions change nothing later, as answers to questions do, the later part is noise."""
    imitate: Natural = 0
    """Updates at the start that imitate the environment's expert in place of reinforcement; `steps` imitates throughout."""
    expert_share: Share = 0.5
    """Share of the environments in which the expert acts while the agent imitates; the agent acts in the others."""
    averaging: Share = 0.0
    """Evaluate an exponential moving average of the weights with this decay, since policy gradients are noisy. The agent plays
    and learns with the newest weights. 0 evaluates the newest weights."""
    goal: Share = 0.95
    """Success, in the hardest band of episodes, from which weights count as solving the task. Among those the ones with the
    fewest live memories are best; once the budget's target is met, those with the highest success, and of equals the newest."""
    eval_episodes: Count = 256
    """Episodes of an evaluation during training."""
    test_episodes: Count = 1000
    """Episodes of the final evaluation, with the best weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = f"minibatches must divide envs, got minibatches {self.minibatches} and envs {self.envs}"
        require(self.envs % self.minibatches == 0, fits)
