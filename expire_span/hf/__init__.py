"""Learned expiry for causal language models of Hugging Face transformers (extra `hf`; 5.17 to 5.22 are tested)."""

from __future__ import annotations

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError("expire_span.hf needs transformers; install it with: pip install 'expire-span[hf]'") from error

from .adapter import load_adapter
from .cache import ExpiringCache
from .retrofit import Retrofit, retrofit
from .settings import RetrofitConfig
from .stream import Stream, stream

__all__ = ["ExpiringCache", "Retrofit", "RetrofitConfig", "Stream", "load_adapter", "retrofit", "stream"]
