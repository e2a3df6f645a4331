"""What every store can do, whatever it holds and however it is laid out.

`ExpiringMemory` holds keys and values for serving, `HiddenMemory` hidden states for learning. A layer's state is
{"memory": Store | None, "position": int}; functions on states (models/state.py) use nothing but this interface.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor


class Store(ABC):
    """Memories of independent batch rows. Every operation returns a new store and leaves the old one valid."""

    layout_name: ClassVar[str]
    """Name of this kind of store in saved states; `restore` looks it up."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes of all tensors, spare slots included."""

    @abstractmethod
    def map_tensors(self, fn: Callable[[Tensor], Tensor]) -> Store:
        """The store with `fn` applied to every tensor it holds; `fn` keeps shapes."""

    @abstractmethod
    def select(self, rows: Tensor) -> Store:
        """Keep, repeat or reorder batch rows by index."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values from which `restore` builds the same store."""
