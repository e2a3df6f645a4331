"""Models that learn when each memory expires. Public names load on first use; importing does nothing else."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "expire_attention": "ops",
    "ExpiringMemory": "memory",
    "load_decoder": "checkpoint",
    "Decoder": "models.decoder",
    "DecoderConfig": "config",
    "ExpireSpanConfig": "config",
    "RunConfig": "config",
    "TrainConfig": "config",
}

__all__ = [
    "Decoder",
    "DecoderConfig",
    "ExpireSpanConfig",
    "ExpiringMemory",
    "RunConfig",
    "TrainConfig",
    "__version__",
    "expire_attention",
    "load_decoder",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'expire_span' has no attribute {name!r}")
    return getattr(importlib.import_module(f"expire_span.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
