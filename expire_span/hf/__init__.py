"""Learned expiry for causal language models of Hugging Face transformers (extra `hf`; 5.17 and 5.22 are tested).

Public names load on first use, so that the settings can be read without transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expire_span.retrofit_configs import RetrofitConfig

    from .cache import ExpiringCache
    from .handle import Retrofit, load_adapter, retrofit
    from .streams import Sampling, Stream, stream
    from .verify import streamed_error

_PUBLIC = {
    "ExpiringCache": "cache",
    "Retrofit": "handle",
    "RetrofitConfig": "handle",
    "Sampling": "streams",
    "Stream": "streams",
    "load_adapter": "handle",
    "retrofit": "handle",
    "stream": "streams",
    "streamed_error": "verify",
}

__all__ = [
    "ExpiringCache",
    "Retrofit",
    "RetrofitConfig",
    "Sampling",
    "Stream",
    "load_adapter",
    "retrofit",
    "stream",
    "streamed_error",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'expire_span.hf' has no attribute {name!r}")
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("expire_span.hf needs transformers; install it with: pip install 'expire-span[hf]'")
    return getattr(importlib.import_module(f"expire_span.hf.{_PUBLIC[name]}"), name)
