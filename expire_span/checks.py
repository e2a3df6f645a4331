"""The checks that settings use for their values. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class Bound:
    """A limit of a number, or of every number in a list, as part of a field's type: `steps: Annotated[int, at_least(1)]`."""

    must: str
    """What the number must do or be, such as "be at least 1"."""
    holds: Callable[[Any], bool]

    def admits(self, value: Any) -> bool:
        """Whether a value, or every value in a list, keeps the limit; None is always allowed."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        return all(x is None or self.holds(x) for x in values)


def at_least(least: float) -> Bound:
    """The limit of numbers that must not be smaller than `least`."""
    return Bound(f"be at least {least}", lambda x: x >= least)


def between(least: int, most: int, unit: str = "") -> Bound:
    """The limit of whole numbers from `least` to `most`, both included."""
    return Bound(f"lie between {least:,} and {most:,}{unit}", lambda x: least <= x <= most)


Count = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
NonNegative = Annotated[float, at_least(0)]
Positive = Annotated[float, Bound("be greater than 0", lambda x: x > 0)]
Duration = Annotated[float, Bound("be greater than 0 and finite", lambda x: 0 < x < math.inf)]
Share = Annotated[float, Bound("lie in [0, 1]", lambda x: 0 <= x <= 1)]
ShareBelowOne = Annotated[float, Bound("lie in [0, 1)", lambda x: 0 <= x < 1)]
ShareAboveZero = Annotated[float, Bound("lie in (0, 1]", lambda x: 0 < x <= 1)]
Temperature = Annotated[float, Bound("be 0 or more and finite", lambda x: 0 <= x < math.inf)]
Seed = Annotated[int, Bound("lie between 0 and 2**63 - 1", lambda x: 0 <= x < 2**63)]
Port = Annotated[int, Bound("lie between 1 and 65535", lambda x: 1 <= x <= 65535)]


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
    for name, bound, value in out_of_bounds(config):
        raise ValueError(f"{name} must {bound.must}, got {show(value)}")


def out_of_bounds(config: Any) -> Iterator[tuple[str, Bound, Any]]:
    """The fields whose values break a limit of their type, each with that limit and the value."""
    for name, bounds in _bounds_of(type(config)).items():
        value = getattr(config, name)
        yield from ((name, bound, value) for bound in bounds if not bound.admits(value))


@functools.cache
def _bounds_of(cls: type) -> dict[str, list[Bound]]:
    """The limits in the types of a config's fields."""
    return {name: _bounds_in(hint) for name, hint in typing.get_type_hints(cls, include_extras=True).items()}


def _bounds_in(hint: Any) -> list[Bound]:
    return [hint] if isinstance(hint, Bound) else [x for part in typing.get_args(hint) for x in _bounds_in(part)]


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
