"""Gymnasium's spaces as the fields that a policy reads and the choices and numbers that it gives."""

from __future__ import annotations

import functools
import hashlib
import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from expire_span.errors import UserError
from expire_span.models.observations import HALF
from expire_span.settings.agent import ObservationField

MOST_WORDS = 4096
"""An integer Box with at most this many values is read as words, one with more as numbers."""
LARGEST_GRID = 16
"""A uint8 Box with three channels and at most this many cells a side is read as a grid of MiniGrid; a larger one is a
picture."""
MOST_CHANNELS = 16
"""A picture has at most this many channels: colours, times the number of frames that are stacked."""
NESTED = ("Dict", "Tuple")


def is_text(space: Any) -> bool:
    """Whether a space's values are strings: Gymnasium's Text, or a space of MiniGrid's missions."""
    return any(kind.__name__ in ("Text", "MissionSpace") for kind in type(space).__mro__)


def parts_of(space: Any) -> list[tuple[Any, Any]]:
    """The parts of a Dict or Tuple space with their keys."""
    return list(space.spaces.items() if type(space).__name__ == "Dict" else enumerate(space.spaces))


def describe_observations(space: Any, name: str = "", words: int = 32) -> tuple[ObservationField, ...]:
    """A Gymnasium observation space as fields; what cannot be read is refused. words: most words of a text."""
    kind, label = type(space).__name__, name or "value"
    if kind in NESTED:
        inner = [describe_observations(part, f"{name}.{k}" if name else str(k), words) for k, part in parts_of(space)]
        return tuple(field for fields in inner for field in fields)
    if is_text(space):
        return (ObservationField(label, "text", (words,)),)
    if kind == "Discrete":
        return (ObservationField(label, "choices", (), (int(space.n),), (int(space.start),)),)
    if kind in ("MultiDiscrete", "MultiBinary"):
        sizes = space.nvec.flatten() if kind == "MultiDiscrete" else np.full(space.shape, 2).flatten()
        lows = getattr(space, "start", np.zeros(space.shape, np.int64)).flatten()
        return (ObservationField(label, "choices", space.shape, tuple(sizes.tolist()), tuple(lows.tolist())),)
    if kind != "Box":
        raise UserError(
            f"observations must be Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict or Tuple, got {space}"
        )
    return (_describe_box(space, label),)


def _describe_box(space: Any, label: str) -> ObservationField:
    shape = tuple(space.shape)
    if 0 in shape:
        raise UserError(f"observation {label} must hold at least one number, got the shape {shape}")
    if space.dtype == np.uint8 and len(shape) == 3 and shape[2] == 3 and max(shape[:2]) <= LARGEST_GRID:
        return ObservationField(label, "grid", shape)
    if space.dtype == np.uint8 and _is_picture(shape):
        return ObservationField(label, "image", shape)
    if np.issubdtype(space.dtype, np.integer) and shape:
        low, high = int(space.low.min()), int(space.high.max())
        if high - low < MOST_WORDS:
            places = int(np.prod(shape))
            return ObservationField(label, "words", shape, (high - low + 1,) * places, (low,) * places)
    return ObservationField(label, "numbers", shape)


def _is_picture(shape: tuple[int, ...]) -> bool:
    """Whether a shape is [H, W], [H, W, C] or [C, H, W] with sides larger than a grid's and few channels."""
    sides = sorted(shape)[-2:]
    few = len(shape) == 2 or (len(shape) == 3 and min(shape) <= MOST_CHANNELS and min(shape) in (shape[0], shape[2]))
    return few and sides[0] > LARGEST_GRID


def flatten_observation(seen: Any, name: str = "") -> dict[str, np.ndarray]:
    """Nested observations by dotted name, as `describe_observations` names them."""
    if isinstance(seen, (dict, tuple)):
        parts = seen.items() if isinstance(seen, dict) else enumerate(seen)
        inner = [flatten_observation(part, f"{name}.{key}" if name else str(key)) for key, part in parts]
        return {label: x for found in inner for label, x in found.items()}
    return {name or "value": np.asarray(seen)}


@functools.lru_cache(maxsize=4096)
def words_of(text: str, most: int) -> tuple[int, ...]:
    """The words and signs of a text as hashes of 20 bits, followed by zeros: `most` numbers."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    if len(words) > most:
        raise UserError(
            f"a text of an observation has {len(words)} words, and task.text_words allows {most}: {text[:60]!r}; "
            f"give --task.text-words {len(words)} or more"
        )
    return tuple(_hash(word) for word in words) + (0,) * (most - len(words))


def _hash(word: str) -> int:
    digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "big") % ((1 << 2 * HALF) - 1)


@dataclass(frozen=True)
class ActionPart:
    """One space of an action: where it is in nested spaces, and which places of a policy's action make its value."""

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    places: tuple[int, ...]
    """Which numbers of a policy's action [K] are this part's, in order."""
    low: np.ndarray
    """Smallest value of each place: of a choice, or of a bounded number; 0 for other numbers."""
    high: np.ndarray
    """Largest value of a bounded number; infinite where it has none."""
    chosen: bool
    """Whether they are choices."""
    dtype: Any


@dataclass(frozen=True)
class ActionLayout:
    """How a policy's action [K], choices first, then numbers, is laid out in a Gymnasium action space."""

    sizes: tuple[int, ...]
    """Number of values of each choice of the space."""
    bounded: tuple[bool, ...]
    """For each continuous number, whether its range is bounded."""
    parts: tuple[ActionPart, ...]
    space: Any
    joint: bool = False
    """Whether a policy makes all choices as one, among their combinations."""

    @property
    def choices(self) -> tuple[int, ...]:
        """Number of values of each choice that a policy makes."""
        return (math.prod(self.sizes),) if self.joint else self.sizes

    @classmethod
    def of(cls, space: Any, env: str, most_joint: int = 1) -> ActionLayout:
        """The layout of an action space; one that no policy can act in is refused.

        most_joint: choices with at most this many combinations are made as one.
        """
        leaves = list(_leaves(space))
        sizes = [_choices_of(leaf, env) for _, leaf in leaves]
        numbers = [() if s is not None else _bounds_of(leaf) for s, (_, leaf) in zip(sizes, leaves)]
        first, second = 0, sum(len(s or ()) for s in sizes)
        parts = []
        for (path, leaf), chosen, bounded in zip(leaves, sizes, numbers):
            count = len(bounded) if chosen is None else len(chosen)
            begin = second if chosen is None else first
            first, second = (first, second + count) if chosen is None else (first + count, second)
            parts.append(_part(path, leaf, tuple(range(begin, begin + count)), bounded))
        kinds = tuple(n for s in sizes for n in s or ()), tuple(b for given in numbers for b in given)
        joint = len(kinds[0]) > 1 and math.prod(kinds[0]) <= most_joint
        return cls(*kinds, tuple(parts), space, joint)

    def give(self, actions: np.ndarray) -> Any:
        """A policy's actions [B, K] as the vector environment takes them."""
        if self.joint:
            apart = np.unravel_index(actions[:, 0].astype(np.int64), self.sizes)
            actions = np.concatenate([np.stack(apart, 1), actions[:, 1:]], 1)
        values = {part.path: _value(part, actions[:, list(part.places)]) for part in self.parts}
        return _nest(self.space, values)

    def number_choices(self, actions: Any) -> np.ndarray | None:
        """The environment's own actions [B] or [B, K] as choices that count from 0, [B, K]; None if they are none of these."""
        part = self.parts[0]
        given = np.asarray(actions)
        given = given.reshape(len(given), -1) - (part.low if len(self.parts) == 1 else 0)
        wrong = given.shape[1] != len(self.sizes) or bool(((given < 0) | (given >= np.array(self.sizes))).any())
        if wrong:
            return None
        chosen = given.astype(np.int64)
        return np.ravel_multi_index(tuple(chosen.T), self.sizes)[:, None] if self.joint else chosen


def _leaves(space: Any, path: tuple[Any, ...] = ()) -> Any:
    if type(space).__name__ in NESTED:
        for key, part in parts_of(space):
            yield from _leaves(part, (*path, key))
    else:
        yield path, space


def _choices_of(space: Any, env: str) -> tuple[int, ...] | None:
    """The number of values of each choice; None for continuous numbers."""
    kind = type(space).__name__
    if kind == "Discrete":
        return (int(space.n),)
    if kind == "MultiDiscrete":
        return tuple(int(n) for n in space.nvec.flatten())
    if kind == "MultiBinary":
        return (2,) * int(np.prod(space.shape))
    if kind == "Box" and np.issubdtype(space.dtype, np.floating) and 0 not in space.shape:
        return None
    if kind == "Box" and np.issubdtype(space.dtype, np.integer) and 0 not in space.shape:
        values = space.high.astype(np.int64) - space.low.astype(np.int64) + 1
        if int(values.max()) <= MOST_WORDS:
            return tuple(int(n) for n in values.flatten())
    raise UserError(
        f"actions must be Discrete, MultiDiscrete, MultiBinary, Box of at least one number, or Dict or Tuple of these, "
        f"got {space} of {env}"
    )


def _bounds_of(space: Any) -> tuple[bool, ...]:
    return tuple((np.isfinite(space.low) & np.isfinite(space.high)).flatten().tolist())


def _part(path: tuple[Any, ...], space: Any, places: tuple[int, ...], bounded: tuple[bool, ...]) -> ActionPart:
    shape = tuple(space.shape)
    if type(space).__name__ == "Box":
        low, high, chosen = space.low.flatten(), space.high.flatten(), not bounded
    else:
        zeros = np.zeros(len(places), np.int64)
        low, high, chosen = zeros + np.asarray(getattr(space, "start", 0)).flatten(), zeros, True
    return ActionPart(path, shape, places, low, high, chosen, space.dtype)


def _value(part: ActionPart, actions: np.ndarray) -> np.ndarray:
    """Actions of one part [B, n] as values of its space, [B, *shape]."""
    if part.chosen:
        values = actions.astype(np.int64) + part.low
    else:
        values = squash(actions, part.low, part.high)
    return values.astype(part.dtype).reshape(len(actions), *part.shape)


def squash(u: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Numbers u between low and high, by tanh where both are finite, and cut off where one is."""
    both = np.isfinite(low) & np.isfinite(high)
    first, last = np.where(both, low, 0.0).astype(np.float64), np.where(both, high, 0.0).astype(np.float64)
    inside = first + (last - first) * (np.tanh(u.astype(np.float64)) + 1) / 2
    return np.clip(np.where(both, inside, u), low, high)


def _nest(space: Any, values: dict[tuple[Any, ...], np.ndarray], path: tuple[Any, ...] = ()) -> Any:
    if type(space).__name__ not in NESTED:
        return values[path]
    inner = {key: _nest(part, values, (*path, key)) for key, part in parts_of(space)}
    return inner if type(space).__name__ == "Dict" else tuple(inner.values())
