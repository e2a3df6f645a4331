"""The context in which the operator is called: none where a call holds its whole sequence, which is the usual case."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from expire_span.ops.call import Call


class Context(Protocol):
    """One part of a sequence whose other parts are elsewhere. All parts have the same number of tokens."""

    def first(self, count: int) -> int:
        """Number of tokens of the sequence before this part, where parts have `count` tokens."""
        ...

    def total(self, count: int) -> int:
        """Number of tokens of the whole sequence, where parts have `count` tokens."""
        ...

    def prepare(self, build: Callable[[], Call]) -> Call:
        """Check this part's arguments by `build`, and, where others wait for this part, tell them of an error."""
        ...

    def attend(self, call: Call, run: Callable[[Call], Tensor]) -> Tensor:
        """The output of the call over all memories that its queries can see, those of other parts included. run: computes a
        call over the memories that it holds."""
        ...

    def share_gradient(self, parameter: Tensor, grad: Tensor, dropped: Callable[[Tensor], Tensor]) -> Tensor:
        """The gradient that this part gives to a parameter whose gradient is dropped by the sum over all parts. grad: this
        part's; dropped: of such a sum, where it is dropped (bool)."""
        ...


_active: Context | None = None
_outside: Callable[..., Any] | None = None


def active_context() -> Context | None:
    return _active


def outside_graphs(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function in a context. In compiled code, the graph ends before it and another begins after it."""
    assert _outside is not None
    return _outside(function, *given)


def _call(function: Callable[..., Any], *given: Any) -> Any:
    return function(*given)


@contextmanager
def within(context: Context) -> Iterator[None]:
    """Let the operator and the layers be called in this context. Contexts do not nest."""
    global _active, _outside
    if _active is not None:
        raise ValueError("a context is active already and contexts do not nest; leave the first one before the second")
    _outside = _outside or torch.compiler.disable(_call)  # here, since it loads the compiler, which takes seconds
    _active = context
    try:
        yield
    finally:
        _active = None
