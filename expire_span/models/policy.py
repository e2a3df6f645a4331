"""The policy: an encoder of observations, the backbone, heads for actions and values. Every memory system can act in it.

Observations are described by plain dataclasses (`ObservationField`), so nothing here knows of any environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.settings.agent import ObservationField, PolicyConfig

from .backbone import Backbone, BackboneAux, Block
from .mixer import Keep

Observation = dict[str, Tensor]
"""The fields of an observation by name, each [B, T, *shape]."""
BLANK = ((0, 1, 2), (0, 5), (0,))
"""For each channel of a cell in MiniGrid's encoding (type, colour, state), the values of cells without an object: the types
unseen, empty and wall; no colour and grey; no state."""
CELL_VALUES = 64
"""Number of embeddings for a cell's type, colour and state each; larger values use the last one."""
SMALL = 0.01
"""Scale of the action head's initial weights, so that all actions are about equally likely at first."""


class Choices:
    """Independent categorical choices, one for each size: the distribution of an action. logits [.., sum(sizes)]."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.parts = [part.log_softmax(-1) for part in logits.float().split(list(sizes), -1)]

    def sample(self) -> Tensor:
        """Draws [.., K] from torch's global generator."""
        return torch.stack([_draw(part) for part in self.parts], -1)

    def likeliest(self) -> Tensor:
        return torch.stack([part.argmax(-1) for part in self.parts], -1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Log probability of actions [.., K], summed over the K choices: [..]."""
        picked = [part.gather(-1, a.unsqueeze(-1)).squeeze(-1) for part, a in zip(self.parts, actions.unbind(-1))]
        return torch.stack(picked).sum(0)

    def entropy(self) -> Tensor:
        return torch.stack([-(part.exp() * part).sum(-1) for part in self.parts]).sum(0)


def _draw(log_probs: Tensor) -> Tensor:
    """The first value whose cumulative probability exceeds a uniform draw: one random number for each choice."""
    share = torch.rand(log_probs.shape[:-1], device=log_probs.device).unsqueeze(-1)
    return (log_probs.exp().cumsum(-1) <= share).sum(-1).clamp_max(log_probs.shape[-1] - 1)


class PolicyOutput(NamedTuple):
    """What a policy returns; it unpacks as `choices, value, state, aux`."""

    choices: Choices
    """Distribution of the actions at each step."""
    value: Tensor
    """Expected discounted return from each step on, [B, T]."""
    state: list[Any]
    aux: BackboneAux


class Policy(nn.Module):
    """`choices, value, state, aux = policy(observation, state)`; a state of None starts fresh."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        if not config.observation or not config.actions:
            given = f"got {len(config.observation)} fields and {len(config.actions)} choices"
            raise ValueError(f"a policy needs to know its observation and its actions, {given}")
        self.config = config
        self.encoder = ObservationEncoder(config.observation, config.dim, config.cell_dim)
        self.backbone = Backbone(config)
        self.action_head = nn.Linear(config.dim, sum(config.actions))
        self.value_head = nn.Linear(config.dim, 1)
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
        choices = Choices(self.action_head(h), self.config.actions)
        return PolicyOutput(choices, self.value_head(h).squeeze(-1), after, aux)


class ObservationEncoder(nn.Module):
    """Maps each field to a vector of width C, adds them up, and applies a non-linearity and a linear map: [B, T, C]."""

    def __init__(self, fields: Sequence[ObservationField], dim: int, cell_dim: int = 16) -> None:
        super().__init__()
        self.names = [field.name for field in fields]
        self.parts = nn.ModuleList(_build_part(field, dim, cell_dim) for field in fields)
        self.out = nn.Linear(dim, dim)

    def forward(self, observation: Observation) -> Tensor:
        encoded = [part(observation[name]) for name, part in zip(self.names, self.parts)]
        return self.out(F.gelu(torch.stack(encoded).sum(0)))


def _build_part(field: ObservationField, dim: int, cell_dim: int) -> nn.Module:
    if field.form == "grid":
        return GridPart(field, dim, cell_dim)
    return NumbersPart(field, dim) if field.form == "numbers" else ChoicesPart(field, dim, cell_dim)


class NumbersPart(nn.Module):
    """Real numbers [B, T, *shape], squashed logarithmically beyond 1 so that no scale has to be known."""

    def __init__(self, field: ObservationField, dim: int) -> None:
        super().__init__()
        self.depth = len(field.shape)
        self.map = nn.Linear(max(field.places, 1), dim)

    def forward(self, x: Tensor) -> Tensor:
        x = _flatten(x.to(self.map.weight.dtype), self.depth)
        return self.map(x.sign() * torch.where(x.abs() > 1, 1 + x.abs().clamp_min(1).log(), x.abs()))


class ChoicesPart(nn.Module):
    """Integers [B, T, *shape]: an embedding for every value. Words share one table at all places, choices have one per
    place."""

    offsets: Tensor

    def __init__(self, field: ObservationField, dim: int, cell_dim: int) -> None:
        super().__init__()
        # Python numbers instead of tensors, since comparisons build policies on the meta device to count their parameters.
        sizes, lows = field.sizes, field.lows or (0,) * len(field.sizes)
        firsts = [0 if field.form == "words" else sum(sizes[:n]) for n in range(len(sizes))]
        self.depth, total = len(field.shape), max(sizes) if field.form == "words" else sum(sizes)
        offsets = torch.tensor([first - low for first, low in zip(firsts, lows)])
        self.register_buffer("offsets", offsets, persistent=False)
        self.embed = nn.Embedding(total, cell_dim)
        self.map = nn.Linear(len(sizes) * cell_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.map(self.embed(_flatten(x.long(), self.depth) + self.offsets).flatten(-2))


class GridPart(nn.Module):
    """Cells [B, T, V, W, 3] in MiniGrid's encoding: a cell is the sum of the embeddings of its type, colour and state."""

    def __init__(self, field: ObservationField, dim: int, cell_dim: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(CELL_VALUES, cell_dim) for _ in range(3))
        self.map = nn.Linear(field.places // 3 * cell_dim, dim)
        # Most cells hold nothing. With random embeddings for them, all observations would start as nearly the same large
        # vector, and attention and spans would take long to tell them apart. So these embeddings start at zero.
        with torch.no_grad():
            for embed, blank in zip(self.embed, BLANK):
                embed.weight[list(blank)] = 0.0  # type: ignore[index, operator]

    def forward(self, x: Tensor) -> Tensor:
        channels = x.long().clamp_max(CELL_VALUES - 1).unbind(-1)  # 3 x [B, T, V, W]
        kinds, colours, states = (embed(channel) for embed, channel in zip(self.embed, channels))
        return self.map((kinds + colours + states).flatten(-3))


def _flatten(x: Tensor, depth: int) -> Tensor:
    """[B, T, *shape] -> [B, T, places]; a single number gets a place of its own."""
    return x.unsqueeze(-1) if depth == 0 else x.flatten(-depth)
