"""Sliding window: each query reads the last `window` tokens, itself included, held in a ring of exactly that size."""

from __future__ import annotations

from expire_span.mixer_configs import SlidingWindowConfig

from .window import Band, WindowMixer


class SlidingWindow(WindowMixer):
    records_alone = True

    def rules(self) -> tuple[list[Band], int]:
        assert isinstance(self.config.mixer, SlidingWindowConfig)
        return [Band(self.config.num_kv_heads, self.config.mixer.window)], 0
