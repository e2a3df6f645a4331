"""Learned expiry for causal language models of Hugging Face transformers (extra `hf`; 5.17, 5.22 and 5.23 are tested).

Public names load on first use, so that the settings can be read without transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from expire_span.extras import install_command

if TYPE_CHECKING:
    from expire_span.settings.retrofit import RetrofitConfig

    from .cache import ExpiringCache
    from .retrofitted import Retrofit, load_adapter, retrofit

_PUBLIC = {
    "ExpiringCache": "cache",
    "Retrofit": "retrofitted",
    "RetrofitConfig": "retrofitted",
    "load_adapter": "retrofitted",
    "retrofit": "retrofitted",
}

__all__ = [
    "ExpiringCache",
    "Retrofit",
    "RetrofitConfig",
    "load_adapter",
    "retrofit",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'expire_span.hf' has no attribute {name!r}")
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(f"expire_span.hf needs transformers; install it with: {install_command('hf')}")
    return getattr(importlib.import_module(f"expire_span.hf.{_PUBLIC[name]}"), name)
