"""The policy: an encoder of observations, the backbone, heads for actions and values. Every memory system can act in it.

Observations are described by plain dataclasses (`ObservationField`), so nothing here knows of any environment.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expire_span.settings.agent import PolicyConfig
from expire_span.store import trim_states

from .actions import ActionDistribution, Both, Choices, Numbers
from .backbone import Backbone, BackboneAux, Block
from .mixer import Keep
from .observations import Observation, ObservationEncoder

SMALL = 0.01
"""Scale of the action head's initial weights, so that all actions are about equally likely at first."""
GUIDE = 8.0
"""Unit of the number by which predicted rewards enter the logits of actions."""
FIRST_LOG = -0.5
"""Logarithm of the standard deviation of continuous actions at first, before squashing."""


class PolicyOutput(NamedTuple):
    """What a policy returns; it unpacks as `choices, value, state, aux`."""

    choices: ActionDistribution
    """Distribution of the actions at each step."""
    value: Tensor
    """Expected discounted return from each step on, [B, T]."""
    state: list[Any]
    aux: BackboneAux


class Policy(nn.Module):
    """`choices, value, state, aux = policy(observation, state)`; a state of None starts fresh."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        acts = len(config.actions) + len(config.continuous)
        if not config.observation or not acts:
            given = f"got {len(config.observation)} fields and {acts} choices"
            raise ValueError(f"a policy needs to know its observation and its actions, {given}")
        self.config = config
        self.encoder = ObservationEncoder(
            config.observation, config.dim, config.cell_dim, config.normalise, config.wide_choices
        )
        self.backbone = Backbone(config)
        self.action_head = nn.Linear(config.dim, sum(config.actions) + len(config.continuous))
        self.value_head = nn.Linear(config.dim, 1)
        self.reward_head = nn.Linear(config.dim, self.action_head.out_features + 1) if config.predict_rewards else None
        if config.guided:
            self.guide = nn.Parameter(torch.zeros(()))
        if config.continuous:
            self.log_std = nn.Parameter(torch.full((len(config.continuous),), FIRST_LOG))
        with torch.no_grad():
            self.action_head.weight.mul_(SMALL)
            self.action_head.bias.zero_()

    def layers(self) -> list[Block]:
        """The blocks as a list of `Block`, for type checkers."""
        return self.backbone.layers()

    def initial_state(self, batch: int, keep: Keep = "hidden") -> list[Any]:
        return self.backbone.initial_state(batch, keep)

    def reset_rows(self, state: list[Any], fresh: Tensor) -> list[Any]:
        """Empty the memory of the rows marked in `fresh` [B] (bool)."""
        return self.backbone.reset_rows(state, fresh)

    @torch.no_grad()
    def begin_steps(self, state: list[Any], count: int) -> list[Any]:
        """The state in a form for at most `count` calls with one step each, without gradients, while weights stay the same."""
        return [block.mixer.begin_steps(part, count) for block, part in zip(self.layers(), trim_states(state))]

    @torch.no_grad()
    def end_steps(self, state: list[Any]) -> list[Any]:
        """The state after those calls in its usual form."""
        return [block.mixer.end_steps(part) for block, part in zip(self.layers(), state)]

    def forward(
        self,
        observation: Observation,
        state: list[Any] | None = None,
        *,
        fresh: Tensor | None = None,
        keep: Keep = "hidden",
    ) -> PolicyOutput:
        """observation: fields [B, T, *shape]. fresh [B] (bool): rows whose memory is emptied first. keep: what a state of None
        begins to keep."""
        return self.read(self.encoder(observation), state, fresh=fresh, keep=keep)

    def read(
        self, x: Tensor, state: list[Any] | None = None, *, fresh: Tensor | None = None, keep: Keep = "hidden"
    ) -> PolicyOutput:
        """The same, given the observation encoder's output x [B, T, C]."""
        h, after, aux = self.backbone(x, state, fresh=fresh, keep=keep)
        return PolicyOutput(self._act(self._guided(self.action_head(h), h)), self.value_head(h).squeeze(-1), after, aux)

    def _guided(self, out: Tensor, features: Tensor) -> Tensor:
        """The head's output with the predicted rewards of the choices added to their logits, times a learned number."""
        if self.reward_head is None or not self.config.guided:
            return out
        count = sum(self.config.actions)
        liked = self.reward_head(features)[..., :count].detach()
        return torch.cat([out[..., :count] + GUIDE * self.guide * liked, out[..., count:]], -1)

    def predict_reward(self, features: Tensor, actions: Tensor) -> Tensor:
        """The reward expected of actions [.., K] where the head of the actions reads features [.., C]: [..]. It is linear in
        both: a number for each value of each choice, a slope for each continuous number, and one that depends on no action."""
        assert self.reward_head is not None
        sizes, bounded = self.config.actions, self.config.continuous
        *parts, slopes, base = self.reward_head(features).split([*sizes, len(bounded), 1], -1)
        picked = [part.gather(-1, a.long().unsqueeze(-1)) for part, a in zip(parts, actions.unbind(-1))]
        numbers = actions[..., len(sizes) :].to(slopes.dtype)
        numbers = torch.where(torch.tensor(bounded, dtype=torch.bool, device=numbers.device), numbers.tanh(), numbers)
        return torch.cat([*picked, slopes * numbers, base], -1).sum(-1)

    def _act(self, out: Tensor) -> ActionDistribution:
        """The distribution of actions from the head's output: logits of the choices, then the means of the numbers."""
        sizes, bounded = self.config.actions, self.config.continuous
        if not bounded:
            return Choices(out, sizes)
        numbers = Numbers(out[..., sum(sizes) :], self.log_std, bounded)
        return Both(Choices(out[..., : sum(sizes)], sizes), numbers) if sizes else numbers
