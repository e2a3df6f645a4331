"""Models that learn when each memory expires. Public names load on first use; importing does nothing else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what editors and type checkers see; at run time a name is imported when it is first used
    from expire_span.checkpoint import load_decoder
    from expire_span.models.backbone import Backbone
    from expire_span.models.decoder import Decoder
    from expire_span.models.encoder import Encoder
    from expire_span.models.lifetimes import Lifetimes
    from expire_span.models.mixer import Mixer, MixerAux, MixerOutput
    from expire_span.models.systems import LayerShape, MemorySystem, register
    from expire_span.models.systems.expire_span import ExpireSpanConfig, HeadReach, PaperDetails
    from expire_span.models.systems.expire_span.layer import ExpireSpan
    from expire_span.ops import expire_attention
    from expire_span.ops.context import ContextGroup, backward_in_pieces, context_parallel
    from expire_span.sampling import Sampling
    from expire_span.settings.models import BackboneConfig, DecoderConfig
    from expire_span.settings.run import RunConfig, TrainConfig
    from expire_span.shipped import SHIPPED
    from expire_span.store import ExpiringMemory
    from expire_span.stream import Stream

__version__ = "0.2.0"

_PUBLIC = {
    "SHIPPED": "shipped",
    "Backbone": "models.backbone",
    "BackboneConfig": "settings.models",
    "ContextGroup": "ops.context",
    "Decoder": "models.decoder",
    "DecoderConfig": "settings.models",
    "Encoder": "models.encoder",
    "ExpireSpan": "models.systems.expire_span.layer",
    "ExpireSpanConfig": "models.systems.expire_span",
    "ExpiringMemory": "store",
    "HeadReach": "models.systems.expire_span",
    "LayerShape": "models.systems",
    "Lifetimes": "models.lifetimes",
    "MemorySystem": "models.systems",
    "Mixer": "models.mixer",
    "MixerAux": "models.mixer",
    "MixerOutput": "models.mixer",
    "PaperDetails": "models.systems.expire_span",
    "RunConfig": "settings.run",
    "Sampling": "sampling",
    "Stream": "stream",
    "TrainConfig": "settings.run",
    "backward_in_pieces": "ops.context",
    "context_parallel": "ops.context",
    "expire_attention": "ops",
    "load_decoder": "checkpoint",
    "register": "models.systems",
}

__all__ = [
    "SHIPPED",
    "Backbone",
    "BackboneConfig",
    "ContextGroup",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "ExpireSpan",
    "ExpireSpanConfig",
    "ExpiringMemory",
    "HeadReach",
    "LayerShape",
    "Lifetimes",
    "MemorySystem",
    "Mixer",
    "MixerAux",
    "MixerOutput",
    "PaperDetails",
    "RunConfig",
    "Sampling",
    "Stream",
    "TrainConfig",
    "__version__",
    "backward_in_pieces",
    "context_parallel",
    "expire_attention",
    "load_decoder",
    "register",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'expire_span' has no attribute {name!r}")
    return getattr(importlib.import_module(f"expire_span.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
