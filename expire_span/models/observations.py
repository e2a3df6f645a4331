"""The encoder of observations: each field is mapped to a vector, by its form, and the vectors are added.

Observations are described by plain dataclasses (`ObservationField`), so nothing here knows of any environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from expire_span.settings.agent import ObservationField

Observation = dict[str, Tensor]
"""The fields of an observation by name, each [B, T, *shape]."""
BLANK = ((0, 1, 2), (0, 5), (0,))
"""For each channel of a cell in MiniGrid's encoding (type, colour, state), the values of cells without an object: the types
unseen, empty and wall; no colour and grey; no state."""
CELL_VALUES = 64
"""Number of embeddings for a cell's type, colour and state each; larger values use the last one."""
HALF = 10
"""Bits of each half of a word's hash."""
PIXEL = 255.0
"""The largest value of a pixel of eight bits."""
CHANNELS = 16
"""Channels of the first convolution; later ones have twice as many."""
FINAL_SIDE = 8
"""Convolutions halve the sides of a picture until they are at most this."""
LEAST_SPREAD = 1e-6
"""Added to the variance of a number before its root is taken."""


class ObservationEncoder(nn.Module):
    """Maps each field to a vector of width C, adds them up, and applies a non-linearity and a linear map: [B, T, C]."""

    def __init__(
        self,
        fields: Sequence[ObservationField],
        dim: int,
        cell_dim: int = 16,
        normalise: bool = False,
        wide: bool = False,
    ) -> None:
        super().__init__()
        self.names = [field.name for field in fields]
        self.parts = nn.ModuleList(_build_part(field, dim, cell_dim, normalise, wide) for field in fields)
        self.out = nn.Linear(dim, dim)

    def forward(self, observation: Observation) -> Tensor:
        encoded = [part(observation[name]) for name, part in zip(self.names, self.parts)]
        return self.out(F.gelu(torch.stack(encoded).sum(0)))

    def note(self, observation: Observation) -> None:
        """Take observations into the running mean and spread of numbers, where these are normalised."""
        for name, part in zip(self.names, self.parts):
            if isinstance(part, NormalisedPart):
                part.note(observation[name])


def _build_part(field: ObservationField, dim: int, cell_dim: int, normalise: bool, wide: bool) -> nn.Module:
    if field.form == "grid":
        return GridPart(field, dim, cell_dim)
    if field.form == "text":
        return TextPart(field, dim, cell_dim)
    if field.form == "image":
        return ImagePart(field, dim)
    if field.form == "numbers":
        return NormalisedPart(field, dim) if normalise else NumbersPart(field, dim)
    return ChoicesPart(field, dim, cell_dim, wide)


class NumbersPart(nn.Module):
    """Real numbers [B, T, *shape], squashed logarithmically beyond 1 so that no scale has to be known."""

    def __init__(self, field: ObservationField, dim: int) -> None:
        super().__init__()
        self.depth = len(field.shape)
        self.map = nn.Linear(max(field.places, 1), dim)

    def forward(self, x: Tensor) -> Tensor:
        x = _flatten(x.to(self.map.weight.dtype), self.depth)
        return self.map(x.sign() * torch.where(x.abs() > 1, 1 + x.abs().clamp_min(1).log(), x.abs()))


class NormalisedPart(NumbersPart):
    """The same, of numbers from which their running mean is taken, and which are divided by their standard deviation.

    Both change only in `note`, between two windows, so that a replayed step reads what the played one read.
    """

    count: Tensor
    mean: Tensor
    spread: Tensor

    def __init__(self, field: ObservationField, dim: int) -> None:
        super().__init__(field, dim)
        places = max(field.places, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(places))
        self.register_buffer("spread", torch.ones(places))
        """Variance of each number."""

    def forward(self, x: Tensor) -> Tensor:
        x = _flatten(x.to(self.map.weight.dtype), self.depth)
        return super().forward(
            ((x - self.mean) / (self.spread + LEAST_SPREAD).sqrt()).view(*x.shape[:-1], *self._shape)
        )

    @property
    def _shape(self) -> tuple[int, ...]:
        """One dimension of numbers for each of the field's, so that the base class flattens them again."""
        return () if self.depth == 0 else (1,) * (self.depth - 1) + (len(self.mean),)

    @torch.no_grad()
    def note(self, x: Tensor) -> None:
        x = _flatten(x.to(self.mean.dtype), self.depth).flatten(0, -2)
        new, total = len(x), self.count + len(x)
        away = x.mean(0) - self.mean
        squares = self.spread * self.count + x.var(0, correction=0) * new + away.square() * self.count * new / total
        self.mean += away * new / total
        self.spread.copy_(squares / total)
        self.count.copy_(total)


class TextPart(nn.Module):
    """Words [B, T, W] by their hashes, 0 where there is none: a word is the sum of the embeddings of both halves of its hash.

    No vocabulary has to be known, and words that share one half still differ in the other.
    """

    def __init__(self, field: ObservationField, dim: int, cell_dim: int) -> None:
        super().__init__()
        self.embed = nn.ModuleList(nn.Embedding(1 << HALF, cell_dim) for _ in range(2))
        self.map = nn.Linear(field.places * cell_dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x.long()
        low, high = (embed(half) for embed, half in zip(self.embed, (x & ((1 << HALF) - 1), x >> HALF)))
        return self.map(((low + high) * (x > 0).unsqueeze(-1)).flatten(-2))


class ImagePart(nn.Module):
    """Pictures [B, T, H, W], or with channels first or last: convolutions that halve the sides until they are at most 8."""

    def __init__(self, field: ObservationField, dim: int) -> None:
        super().__init__()
        self.depth = len(field.shape)
        self.last = self.depth == 3 and field.shape[2] <= field.shape[0]
        """Whether the channels come last."""
        sides = field.shape if self.depth == 2 else field.shape[:2] if self.last else field.shape[1:]
        channels, (high, wide) = 1 if self.depth == 2 else field.shape[2 if self.last else 0], sides
        layers: list[nn.Module] = []
        while max(high, wide) > FINAL_SIDE:
            inner = 2 * CHANNELS if layers else CHANNELS
            layers += [nn.Conv2d(channels, inner, 3, stride=2, padding=1), nn.GELU()]
            channels, high, wide = inner, (high + 1) // 2, (wide + 1) // 2
        self.layers = nn.Sequential(*layers)
        self.map = nn.Linear(channels * high * wide, dim)

    def forward(self, x: Tensor) -> Tensor:
        pixels = x.flatten(0, 1) if x.dim() == self.depth + 2 else x
        pixels = pixels.unsqueeze(1) if self.depth == 2 else pixels.movedim(-1, 1) if self.last else pixels
        scale = PIXEL if x.dtype == torch.uint8 else 1.0
        seen = self.layers(pixels.to(self.map.weight.dtype) / scale)
        return self.map(seen.flatten(1)).view(*x.shape[: x.dim() - self.depth], -1)


class ChoicesPart(nn.Module):
    """Integers [B, T, *shape]: an embedding for every value. Words share one table at all places, choices have one per
    place."""

    offsets: Tensor

    def __init__(self, field: ObservationField, dim: int, cell_dim: int, wide: bool = False) -> None:
        super().__init__()
        # Python numbers instead of tensors, since comparisons build policies on the meta device to count their parameters.
        sizes, lows = field.sizes, field.lows or (0,) * len(field.sizes)
        firsts = [0 if field.form == "words" else sum(sizes[:n]) for n in range(len(sizes))]
        self.depth, total = len(field.shape), max(sizes) if field.form == "words" else sum(sizes)
        offsets = torch.tensor([first - low for first, low in zip(firsts, lows)])
        self.register_buffer("offsets", offsets, persistent=False)
        width = dim if wide and max(sizes) > cell_dim else cell_dim
        self.embed = nn.Embedding(total, width)
        self.map = nn.Linear(len(sizes) * width, dim)

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
