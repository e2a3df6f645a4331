"""Attention sinks: the first k tokens of a row and a window of the last ones.

Difference from the original, which renumbers positions inside the cache: rotary positions stay those of the stream, so that
parallel training and streaming compute the same function.
"""

from __future__ import annotations

from expire_span.models.kit.window import Band, WindowMixer
from expire_span.models.systems.streaming_sinks import StreamingSinksConfig


class StreamingSinks(WindowMixer):
    settings_class = StreamingSinksConfig
    settings: StreamingSinksConfig

    def bands_and_sinks(self) -> tuple[list[Band], int]:
        m = self.settings
        return [Band(self.shape.num_kv_heads, m.window)], m.sinks
