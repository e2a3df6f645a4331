"""Settings of models. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from expire_span.checks import require
from expire_span.mixer_configs import ExpireSpanConfig, MixerConfig


@dataclass(frozen=True)
class DecoderConfig:
    """The one skeleton: embed, blocks of (mixer, feed-forward), head. `paper()` and `modern()` are its two presets."""

    vocab: int = 256
    """Number of token kinds."""
    dim: int = 256
    """Width of the hidden state (C)."""
    layers: int = 4
    """Number of blocks."""
    heads: int = 4
    """Query heads; must divide dim."""
    kv_heads: int | None = None
    """Key/value heads, each shared by heads / kv_heads query heads; None means as many as heads."""
    ff_dim: int = 1024
    """Inner width of the feed-forward part."""
    norm: Literal["pre", "post"] = "pre"
    """Normalise before each part (with a final norm), or after adding it."""
    norm_kind: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    activation: Literal["relu", "relu2", "swiglu"] = "relu2"
    """Feed-forward non-linearity: ReLU, squared ReLU or SwiGLU."""
    positions: Literal["rotary", "relative", "none"] = "rotary"
    """Rotary angles, or the paper's learned key embedding for the last `relative_window` distances, or nothing."""
    relative_window: int = 256
    """How many distances have a learned key embedding (M), with positions=relative."""
    rotary_base: float = 10_000.0
    """Base of the rotary frequencies."""
    qk_norm: bool = True
    """Normalise queries and keys per head before the product."""
    dropout: float = 0.0
    """Dropout on the mixer's output and inside the feed-forward part."""
    layer_drop: float = 0.0
    """Chance of skipping a block in training; the spans of a skipped block still age and expire."""
    mixer: MixerConfig = field(default_factory=ExpireSpanConfig)
    """The memory system of every block."""

    def __post_init__(self) -> None:
        require(self.vocab >= 2, f"vocab must be at least 2, got {self.vocab}")
        require(self.layers >= 1, f"layers must be at least 1, got {self.layers}")
        require(self.heads >= 1, f"heads must be at least 1, got {self.heads}")
        require(self.dim % self.heads == 0, f"heads must divide dim, got heads {self.heads} and dim {self.dim}")
        kv = self.num_kv_heads
        require(
            kv >= 1 and self.heads % kv == 0, f"kv_heads must divide heads, got kv_heads {kv} and heads {self.heads}"
        )
        require(
            self.positions != "rotary" or self.head_dim % 2 == 0,
            f"rotary positions need an even head dim, got {self.head_dim}",
        )
        require(self.relative_window >= 1, f"relative_window must be at least 1, got {self.relative_window}")
        for name in ("dropout", "layer_drop"):
            require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), got {getattr(self, name)}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @classmethod
    def paper(cls, **fields: Any) -> DecoderConfig:
        """Post-norm LayerNorm, ReLU, learned relative positions, no attention from a token to itself."""
        base = cls(
            norm="post",
            norm_kind="layer",
            activation="relu",
            positions="relative",
            qk_norm=False,
            mixer=ExpireSpanConfig(include_self=False, normalizer_eps=1e-8),
        )
        return replace(base, **fields)

    @classmethod
    def modern(cls, **fields: Any) -> DecoderConfig:
        """Pre-norm RMSNorm, squared ReLU, rotary positions, normalised queries and keys."""
        return replace(cls(), **fields)
