"""What vLLM is told when it loads the plugin."""

from __future__ import annotations

from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import CircularBufferSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from expire_span.vllm.options import ARCHITECTURE

from .settings import ExpireSpanSettings
from .spec import ExpireSpec

HERE = __name__.rpartition(".")[0]


def register_all() -> None:
    KVCacheSpecRegistry._ensure_registered()  # registering into an empty registry would keep vLLM's own specs out
    KVCacheSpecRegistry.register(ExpireSpec, CircularBufferManager, uniform_type_base_spec=CircularBufferSpec)
    ModelRegistry.register_model(ARCHITECTURE, f"{HERE}.model:{ARCHITECTURE}")
    register_backend(AttentionBackendEnum.CUSTOM, f"{HERE}.backend.ExpireBackend")
    MODELS_CONFIG_MAP[ARCHITECTURE] = ExpireSpanSettings
