"""Attention sinks: the first k tokens of a row and a window of the last ones.

Difference from the original, which renumbers positions inside the cache: rotary positions stay those of the stream, so that
training in parallel and streaming are one function.
"""

from __future__ import annotations

from expire_span.mixer_configs import StreamingSinksConfig

from .window import Band, WindowMixer


class StreamingSinks(WindowMixer):
    def rules(self) -> tuple[list[Band], int]:
        m = self.config.mixer
        assert isinstance(m, StreamingSinksConfig)
        return [Band(self.config.num_kv_heads, m.window)], m.sinks
