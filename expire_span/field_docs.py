"""The documentation of settings: the string under each field of a dataclass, for `help()` and for the command line.

Standard library only. Python does not keep such strings at run time, so they are read from the source file when needed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_without_fields = False

_parsing = threading.Lock()
"""Lets one thread parse at a time: in Python 3.11 two threads that parse at once may both fail ("recursion depth mismatch")."""


@contextlib.contextmanager
def without_fields() -> Iterator[None]:
    """A context in which docstrings do not list fields: the command line's parser reads the strings itself, and faster."""
    global _without_fields
    before, _without_fields = _without_fields, True
    try:
        yield
    finally:
        _without_fields = before


def documented(cls: type[T]) -> type[T]:
    """Class decorator above `@dataclass`: `help(cls)` then shows what each field means."""
    cls.__doc__ = _WithFields(cls.__doc__ or "")  # type: ignore[assignment]
    return cls


class _WithFields:
    """The docstring of a class, with its fields listed when it is read."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get__(self, instance: Any, owner: type) -> str:
        if _without_fields:
            return self.text
        fields = [f"    {name}: {' '.join(text.split())}" for name, text in field_docs(owner).items()]
        return "\n".join([inspect.cleandoc(self.text), "", "Attributes:", *fields]) if fields else self.text


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        body = _classes_of(inspect.getsourcefile(base) if base.__module__ != "builtins" else None).get(base.__name__)
        if body is None:
            continue
        for field, after in zip(body.body, body.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                docs[field.target.id] = str(ast.literal_eval(after.value))
    return docs


@functools.cache
def _classes_of(path: str | None) -> dict[str, ast.ClassDef]:
    """The classes of a source file by name; empty if there is no source, as in a frozen program."""
    try:
        with _parsing:
            tree = ast.parse(Path(path or "").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
