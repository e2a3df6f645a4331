"""The documentation of settings: the string under each field of a dataclass, for `help()` and for the command line.

Standard library only. Python forgets such strings when it runs a file, so they are read from the source when somebody asks.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from typing import Any, TypeVar

T = TypeVar("T")


def documented(cls: type[T]) -> type[T]:
    """Class decorator above `@dataclass`: `help(cls)` then shows what each field means."""
    cls.__doc__ = _WithFields(cls.__doc__ or "")  # type: ignore[assignment]
    return cls


class _WithFields:
    """A class's documentation, put together when it is read."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get__(self, instance: Any, owner: type) -> str:
        fields = [f"    {name}: {' '.join(text.split())}" for name, text in field_docs(owner).items()]
        return "\n".join([inspect.cleandoc(self.text), "", "Attributes:", *fields]) if fields else self.text


@functools.cache
def field_docs(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass and of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # no source, as in a frozen program: names and defaults still help
            continue
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                docs[field.target.id] = str(ast.literal_eval(after.value))
    return docs
