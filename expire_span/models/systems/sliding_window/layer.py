"""Sliding window: each query reads the last `window` tokens, itself included, held in a ring of exactly that size."""

from __future__ import annotations

from expire_span.models.kit.window import Band, WindowMixer
from expire_span.models.systems.sliding_window import SlidingWindowConfig


class SlidingWindow(WindowMixer):
    settings_class = SlidingWindowConfig
    settings: SlidingWindowConfig
    recordable_alone = True

    def bands_and_sinks(self) -> tuple[list[Band], int]:
        return [Band(self.shape.num_kv_heads, self.settings.window)], 0
