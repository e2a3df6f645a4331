"""The former place of the memory systems' settings, which moved to their systems' folders under `expire_span.models.systems` in
0.2.0; these aliases are removed in 0.3.0.
"""

from __future__ import annotations

from typing import Any

from expire_span.checks import require
from expire_span.models.systems import mixer_config
from expire_span.models.systems.adaptive_span import AdaptiveSpanConfig
from expire_span.models.systems.bigbird import BigBirdConfig
from expire_span.models.systems.compressive import CompressiveConfig
from expire_span.models.systems.expire_span import ExpireSpanConfig
from expire_span.models.systems.forgetting import ForgettingConfig
from expire_span.models.systems.full import FullConfig
from expire_span.models.systems.linear import LinearConfig
from expire_span.models.systems.longformer import LongformerConfig
from expire_span.models.systems.performer import PerformerConfig
from expire_span.models.systems.recurrent import GRUConfig, LSTMConfig, TanhRNNConfig, TorchGRUConfig
from expire_span.models.systems.reformer import ReformerConfig
from expire_span.models.systems.routing import RoutingConfig
from expire_span.models.systems.sliding_window import SlidingWindowConfig
from expire_span.models.systems.streaming_sinks import StreamingSinksConfig
from expire_span.models.systems.transformer_xl import TransformerXLConfig

__all__ = [
    "AdaptiveSpanConfig",
    "BigBirdConfig",
    "CompressiveConfig",
    "ExpireSpanConfig",
    "ForgettingConfig",
    "FullConfig",
    "GRUConfig",
    "LSTMConfig",
    "LinearConfig",
    "LongformerConfig",
    "MixerConfig",
    "PerformerConfig",
    "ReformerConfig",
    "RoutingConfig",
    "SlidingWindowConfig",
    "StreamingSinksConfig",
    "TanhRNNConfig",
    "TorchGRUConfig",
    "TransformerXLConfig",
    "mixer_config",
    "require",
]

MixerConfig = Any
"""Any memory system's settings; each has a literal `kind`."""
