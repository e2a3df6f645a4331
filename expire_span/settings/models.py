"""Settings of models. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from expire_span.checks import Count, ShareBelowOne, at_least, checked, require
from expire_span.field_docs import documented
from expire_span.models import systems
from expire_span.models.systems import AttentionShape, LayerShape
from expire_span.models.systems.expire_span import ExpireSpanConfig, PaperDetails


@documented
@dataclass(frozen=True)
@checked
class BackboneConfig(AttentionShape):
    """Blocks of a memory system and a feed-forward part, from hidden states to hidden states."""

    layers: Count = 4
    """Number of blocks."""
    ff_dim: Count = 1024
    """Inner width of the feed-forward part."""
    norm: Literal["pre", "post"] = "pre"
    """Normalise before each part (with a final norm), or after adding it."""
    norm_kind: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    activation: Literal["relu", "relu2", "swiglu"] = "relu2"
    """Feed-forward non-linearity: ReLU, squared ReLU or SwiGLU."""
    dropout: ShareBelowOne = 0.0
    """Dropout on the mixer's output and inside the feed-forward part."""
    layer_drop: ShareBelowOne = 0.0
    """Chance of skipping a block in training; the spans of a skipped block still age and expire."""
    mixer: systems.MixerConfig = field(default_factory=ExpireSpanConfig)  # type: ignore[reportInvalidTypeForm]
    """The memory system of every block, or of the blocks marked m in the pattern."""
    partner: systems.MixerConfig | None = None  # type: ignore[reportInvalidTypeForm]
    """A second memory system, for models whose layers differ: the blocks marked p in the pattern."""
    pattern: str = ""
    """Which block has which memory system, from the first block on and repeated: m for mixer, p for partner. For example pppm
    is three partners to one mixer; empty is mixer everywhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(set(self.pattern) <= {"m", "p"}, f"pattern must consist of m and p, got {self.pattern!r}")
        paired = ("p" in self.pattern) == (self.partner is not None)
        require(paired, f"pattern and partner go together, got pattern {self.pattern!r} and partner {self.partner}")

    def shape(self, layer: int) -> LayerShape:
        """The shape of the layer with index `layer`, from 0."""
        return LayerShape(**{f.name: getattr(self, f.name) for f in fields(AttentionShape)}, depth=layer)

    def mixer_of(self, layer: int) -> Any:
        """The settings of the memory system in the layer with index `layer`, from 0."""
        mark = self.pattern[layer % len(self.pattern)] if self.pattern else "m"
        return self.mixer if mark == "m" else self.partner

    @property
    def mixers(self) -> list[Any]:
        """The settings of the memory system of every layer, from the first on."""
        return [self.mixer_of(layer) for layer in range(self.layers)]

    def with_mixer(self, name: str) -> Any:
        """This model with another memory system, or with a hybrid of two: gru+expire_span has a layer of the first, one of the
        second, and so on in turn, and as many layers as it has parts at least. What this model has keeps its settings."""
        parts = systems.parts_of_mixer(name)
        known = {m.kind: m for m in (self.partner, self.mixer) if m is not None}
        mixers = [known[kind] if kind in known else systems.mixer_config(kind) for _, kind in parts]
        if len(parts) == 1:
            return replace(self, mixer=mixers[0], partner=None, pattern="")
        pattern = "".join(count * mark for (count, _), mark in zip(parts, "pm"))
        layers = max(self.layers, len(pattern))
        return replace(self, mixer=mixers[1], partner=mixers[0], pattern=pattern, layers=layers)

    @classmethod
    def paper(cls, **fields: Any) -> Any:
        """Post-norm LayerNorm, ReLU, learned relative positions, no attention from a token to itself."""
        base = cls(
            norm="post",
            norm_kind="layer",
            activation="relu",
            positions="relative",
            qk_norm=False,
            mixer=ExpireSpanConfig(paper=PaperDetails(include_self=False, normalizer_eps=1e-8)),
        )
        return replace(base, **fields)

    @classmethod
    def modern(cls, **fields: Any) -> Any:
        """Pre-norm RMSNorm, squared ReLU, rotary positions, normalised queries and keys."""
        return replace(cls(), **fields)


@documented
@dataclass(frozen=True)
@checked
class DecoderConfig(BackboneConfig):
    """Tokens in, logits of the next token out: embedding, backbone, head. `paper()` and `modern()` are two presets."""

    vocab: Annotated[int, at_least(2)] = 256
    """Number of token kinds."""
