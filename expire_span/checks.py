"""The checks that settings use for their values. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def at_least(settings: Any, least: int, *names: str) -> None:
    """Refuse settings whose named fields, or any number in a list there, are smaller than `least`; None is allowed."""
    for name in names:
        given = getattr(settings, name)
        for value in given if isinstance(given, (tuple, list)) else (given,):
            require(value is None or value >= least, f"{name} must be at least {least}, got {show(given)}")


def above_zero(settings: Any, *names: str) -> None:
    """Refuse settings whose named fields are zero or negative; None is allowed."""
    for name in names:
        value = getattr(settings, name)
        require(value is None or value > 0, f"{name} must be greater than 0, got {value}")


def check_seed(seed: int, name: str = "seed") -> None:
    """Refuse a number that cannot be a seed of a random generator."""
    require(0 <= seed < 2**63, f"{name} must lie between 0 and 2**63 - 1, got {seed}")


def as_whole(value: Any) -> int | None:
    """The value as an int if it is a whole number of any library (NumPy's, a tensor of one), else None; True is no number."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):  # a tensor of several numbers has no one index
        return None


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse an argument that is not a whole number of at least `least`."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(whole, f"{name} must be a whole number of at least {least}, got {show(value)}")


def checked(cls: type[T]) -> type[T]:
    """Class decorator below `@dataclass`: values that do not fit their field's type are refused before anything else."""
    own = cls.__dict__.get("__post_init__")

    def __post_init__(self: Any) -> None:
        if type(self)._checked_by is cls:  # the check of a subclass covers the fields of its bases
            check_fields(self)
        inherited = getattr(super(cls, self), "__post_init__", None)
        if own is not None:
            own(self)
        elif inherited is not None:
            inherited()

    cls.__post_init__, cls._checked_by = __post_init__, cls  # type: ignore[attr-defined]
    return cls


def check_fields(config: Any, *, finite: bool = True, **hints: Any) -> None:
    """Refuse values of a config that do not fit the type of their field, in one sentence that names the field.

    finite: if False, infinities and NaN are allowed, for configs inside others that check them and report their full name.
    hints: the types of fields that differ between objects of the class.
    """
    for name, members in {**_types_of(type(config)), **{n: members_of(hint) for n, hint in hints.items()}}.items():
        value = getattr(config, name)
        endless = not finite and float in members and isinstance(value, float)
        if not endless and not any(_holds(member, value) for member in members):
            wanted = " or ".join(dict.fromkeys(map(describe, members)))
            raise ValueError(f"{name} must be {wanted}, got {show(value)}{_settings_hint(members, value)}")


@functools.cache
def _types_of(cls: type) -> dict[str, tuple[Any, ...]]:
    """The types that each field of a config may have. Resolving annotations takes milliseconds, so it is done once."""
    return {name: members_of(hint) for name, hint in typing.get_type_hints(cls).items()}


def members_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def fits(hint: Any, value: Any) -> bool:
    """Whether a field of this type may have this value."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return any(value == word and type(value) is type(word) for word in typing.get_args(hint))
    if origin in (tuple, list):
        return isinstance(value, (tuple, list))
    if hint is float:  # some programs write 1.0 as 1 in JSON; NaN and infinity are refused
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hasattr(hint, "kind"):  # settings with a kind may also be those of a class that is registered from outside
        return dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "kind")
    return isinstance(hint, type) and isinstance(value, hint)


def _holds(hint: Any, value: Any) -> bool:
    """Whether a value fits; for a list, whether every item does."""
    if typing.get_origin(hint) is not tuple or not fits(hint, value):
        return fits(hint, value)
    kinds = typing.get_args(hint)
    kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
    return len(kinds) == len(value) and all(map(fits, kinds, value))


def describe(hint: Any) -> str:
    """The values that a field of this type may have, in words."""
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    if dataclasses.is_dataclass(hint):
        kind = getattr(hint, "kind", None)
        return f"a {getattr(hint, '__name__', hint)}" if kind is None else "a settings object"
    if typing.get_origin(hint) is tuple:
        kinds = typing.get_args(hint)
        return f"a list of {'some' if kinds[-1] is Ellipsis else len(kinds)}, each {describe(kinds[0])}"
    names = {int: "a whole number", float: "a finite number", str: "text", bool: "true or false", type(None): "None"}
    return names.get(hint) or "a list"


def show(value: Any) -> str:
    """A value as an error shows it; of a long one, no more than that is looked at."""
    if isinstance(value, (str, bytes, list)):
        value = value[:100]
    try:
        text = repr(value)
    except RecursionError:
        text = "lists within lists, more deeply than can be shown"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _settings_hint(members: tuple[Any, ...], value: Any) -> str:
    """What to write instead, if a string or a class was given where a settings object belongs."""
    classes: list[Any] = [member for member in members if dataclasses.is_dataclass(member)]
    named = [cls for cls in classes if value is cls or (isinstance(value, str) and value == getattr(cls, "kind", None))]
    found = next(iter(named), None)
    some = found or next(iter(classes), None)
    if some is None:
        return ""
    return f"; give {some.__module__}.{some.__name__}(...)" + ("" if found or len(classes) == 1 else ", for example")
