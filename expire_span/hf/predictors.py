"""The one place that builds a layer's predictor of lifetimes."""

from __future__ import annotations

from torch import nn

from expire_span.models.lifetimes import Lifetimes
from expire_span.retrofit_configs import RetrofitConfig


def build_predictor(dim: int, kv_heads: int, config: RetrofitConfig) -> nn.Module:
    """A module that gives hidden states [B, S, C] spans [B, Hkv, S] in tokens, its weights in float32."""
    return Lifetimes(dim, kv_heads, config.lifetimes()).float()
