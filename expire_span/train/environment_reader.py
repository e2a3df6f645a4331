"""A Gymnasium wrapper around every environment: texts become numbers, and an observation of another shape is refused."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from expire_span.errors import UserError

from .spaces import NESTED, is_text, parts_of, words_of

LARGEST = 2**31 - 1


class EnvironmentReader(gymnasium.Wrapper):
    """The environment with observations that fit its observation space, and with texts as hashes of their words."""

    def __init__(self, env: gymnasium.Env, name: str, words: int) -> None:
        super().__init__(env)
        self.name, self.words, self.given = name, words, env.observation_space
        self.observation_space = _without_texts(self.given, words)

    def reset(self, **options: Any) -> Any:
        seen, info = self.env.reset(**options)
        return self._read(seen, self.given, ""), info

    def step(self, action: Any) -> Any:
        seen, *rest = self.env.step(action)
        return self._read(seen, self.given, ""), *rest

    def _read(self, seen: Any, space: Any, name: str) -> Any:
        kind = type(space).__name__
        if kind in NESTED:
            return self._read_nested(seen, space, name, kind)
        if is_text(space):
            if not isinstance(seen, str):
                raise self._wrong(name, "a text", f"{type(seen).__name__}")
            return np.array(words_of(seen, self.words), np.int32)
        shape, wanted = np.shape(seen), tuple(space.shape)
        if shape != wanted:
            raise self._wrong(name, f"the shape {wanted} of its space", f"{shape}")
        return seen

    def _read_nested(self, seen: Any, space: Any, name: str, kind: str) -> Any:
        parts = parts_of(space)
        wanted = dict if kind == "Dict" else tuple
        if not isinstance(seen, wanted):
            raise self._wrong(name, f"a {wanted.__name__}", type(seen).__name__)
        given = seen.keys() if isinstance(seen, dict) else range(len(seen))
        if set(given) != {key for key, _ in parts}:
            raise self._wrong(name, f"the parts {[key for key, _ in parts]} of its space", f"{list(given)}")
        read = {key: self._read(seen[key], part, f"{name}.{key}" if name else str(key)) for key, part in parts}
        return read if kind == "Dict" else tuple(read.values())

    def _wrong(self, name: str, wanted: str, got: str) -> UserError:
        return UserError(f"the observation {name or 'value'} of environment {self.name} must have {wanted}, got {got}")


def _without_texts(space: Any, words: int) -> Any:
    """The space with a Box of whole numbers in place of every text."""
    kind = type(space).__name__
    if is_text(space):
        return spaces.Box(0, LARGEST, (words,), np.int32)
    if kind not in NESTED:
        return space
    inner = {key: _without_texts(part, words) for key, part in parts_of(space)}
    if all(new is old for new, (_, old) in zip(inner.values(), parts_of(space))):
        return space
    return spaces.Dict(inner) if kind == "Dict" else spaces.Tuple(tuple(inner.values()))
