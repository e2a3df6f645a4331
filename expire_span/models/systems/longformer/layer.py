"""Longformer, causal: a window that grows with depth, some dilated heads, and global first tokens.

A global token is read by every later query. In the original it also reads all other tokens; here the global tokens are the
first ones of a row, so a causal window already covers everything before them.
"""

from __future__ import annotations

from expire_span.models.kit.window import Band, WindowMixer
from expire_span.models.systems.longformer import LongformerConfig, window_at


class Longformer(WindowMixer):
    settings_class = LongformerConfig
    settings: LongformerConfig

    def bands_and_sinks(self) -> tuple[list[Band], int]:
        m, heads = self.settings, self.shape.num_kv_heads
        if m.dilated_heads > heads:
            raise ValueError(f"dilated_heads must be at most the {heads} key/value heads, got {m.dilated_heads}")
        window = window_at(m, self.shape.depth)
        bands = [Band(heads - m.dilated_heads, window), Band(m.dilated_heads, window, m.dilation)]
        return [band for band in bands if band.heads], m.global_tokens
