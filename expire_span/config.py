"""Frozen dataclasses that describe a run. Standard library only, so that `--help` needs no torch.

A run is a `RunConfig`: a task, a model, how to train it. Every field is documented under it; the same words are the
command line's help. `to_dict` and `from_dict` turn any config into JSON and back.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from expire_span.mixer_configs import ExpireSpanConfig, MixerConfig, require

FORMAT_VERSION = 1
"""Version of the run folder's layout and of config.json."""


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


@dataclass(frozen=True)
class TextTask:
    """Predict the next byte of a file, or of every file of a folder in name order."""

    kind: Literal["text"] = "text"
    path: str = ""
    """File or folder of text; bytes are read as they are."""
    valid_share: float = 0.05
    """Share of the bytes, after the training bytes, that is kept for validation."""
    test_share: float = 0.05
    """Share of the bytes, at the very end, that is kept for the test."""

    def __post_init__(self) -> None:
        for name in ("valid_share", "test_share"):
            require(0 < getattr(self, name) < 0.5, f"{name} must lie between 0 and 0.5, got {getattr(self, name)}")


@dataclass(frozen=True)
class RecallTask:
    """A colour cue, a long corridor of distracting observations, then: which colour was it?"""

    kind: Literal["recall"] = "recall"
    min_length: int = 50
    """Shortest corridor, in steps."""
    max_length: int = 300
    """Longest corridor, in steps."""
    colours: int = 4
    """Number of colours a cue can have."""
    distractors: int = 8
    """Number of kinds of plain corridor observations."""
    distractor_prob: float = 0.3
    """Chance that a corridor step shows a coloured niche: any colour, and it means nothing."""
    blank_prob: float = 0.0
    """Share of episodes without a cue, to be answered with "none"; else one colour can be told from its absence alone."""

    def __post_init__(self) -> None:
        require(self.min_length >= 1, f"min_length must be at least 1, got {self.min_length}")
        require(
            self.max_length >= self.min_length,
            f"max_length must be at least min_length, got {self.max_length} and {self.min_length}",
        )
        require(self.colours >= 2, f"colours must be at least 2, got {self.colours}")
        require(self.distractors >= 1, f"distractors must be at least 1, got {self.distractors}")
        for name in ("distractor_prob", "blank_prob"):
            require(0 <= getattr(self, name) <= 1, f"{name} must lie in [0, 1], got {getattr(self, name)}")

    @property
    def farthest(self) -> int:
        """The most steps back that an answer hangs on: from the question to the cue."""
        return self.max_length + 1


@dataclass(frozen=True)
class EntrancesTask:
    """A number every step: how many times has the series come into [0, 1] so far?"""

    kind: Literal["entrances"] = "entrances"
    min_length: int = 20
    """Shortest series, in steps."""
    max_length: int = 20
    """Longest series, in steps."""
    max_count: int = 25
    """Largest count with an answer of its own; from there on the answer stays."""
    spread: float = 1.5
    """Standard deviation of the series around 0.5, before the margin."""
    smooth: int = 3
    """Draws that each value is the mean of; neighbours share all but one."""
    margin: float = 0.2
    """No value lies nearer than this to 0 or to 1, so that nothing hangs on the exact place of an edge."""
    levels: int = 4
    """Tokens for each unit of the series: what a decoder reads of a value."""

    def __post_init__(self) -> None:
        for name in ("min_length", "max_count", "smooth", "levels"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.max_length >= self.min_length,
            f"max_length must be at least min_length, got {self.max_length} and {self.min_length}",
        )
        require(self.spread > 0, f"spread must be greater than 0, got {self.spread}")
        require(0 <= self.margin < 0.5, f"margin must lie in [0, 0.5), got {self.margin}")

    @property
    def farthest(self) -> int:
        """The most steps back that an answer hangs on: to the first value."""
        return self.max_length - 1


@dataclass(frozen=True)
class WordsTask:
    """Predict the next word of a text file, or of built-in little tales."""

    kind: Literal["words"] = "words"
    path: str = ""
    """File of text; empty takes built-in tales, in which things said early matter late."""
    words: int = 5000
    """Vocabulary: so many of the commonest words and marks of the training part; all others are "unknown"."""
    tales: int = 2000
    """How many tales are told, where no file is given."""
    valid_share: float = 0.05
    """Share of the words, after the training words, that is kept for validation."""
    test_share: float = 0.05
    """Share of the words, at the very end, that is kept for the test."""

    def __post_init__(self) -> None:
        for name in ("words", "tales"):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("valid_share", "test_share"):
            require(0 < getattr(self, name) < 0.5, f"{name} must lie between 0 and 0.5, got {getattr(self, name)}")


TaskConfig = TextTask | RecallTask | EntrancesTask | WordsTask
"""Any task's config; each has a literal `kind`."""


@dataclass(frozen=True)
class BudgetConfig:
    """Hold the mean number of live memories to a target; the span loss weight follows by itself."""

    live: float | None = None
    """Target: mean live memories per query, averaged over layers. None leaves the loss weight fixed."""
    bytes: int | None = None
    """The same target in bytes of key/value cache per row, over all layers; give live or bytes, not both."""
    initial_weight: float = 1e-6
    """Loss weight the controller starts from."""
    gain: float = 0.05
    """How fast the weight follows: at twice the target it grows by about this share times 0.7 each step."""
    max_weight: float = 1e-1
    """Upper limit of the weight."""
    start_loss: float | None = None
    """Wait with any span loss until the task loss (a running mean, nats) has once fallen below this; None starts at once."""
    patience_loss: float | None = None
    """Let the weight shrink while the running task loss is above this, so that pressure never undoes the task; None is off."""

    def __post_init__(self) -> None:
        require(self.live is None or self.bytes is None, f"give budget live or bytes, got {self.live} and {self.bytes}")
        for name in ("live", "bytes"):
            value = getattr(self, name)
            require(value is None or value > 0, f"budget {name} must be greater than 0, got {value}")
        require(self.initial_weight > 0, f"initial_weight must be greater than 0, got {self.initial_weight}")
        require(self.gain > 0, f"gain must be greater than 0, got {self.gain}")

    @property
    def active(self) -> bool:
        return self.live is not None or self.bytes is not None


@dataclass(frozen=True)
class TrainConfig:
    """How the weights are learned."""

    steps: int = 1000
    """Optimizer steps."""
    batch: int = 16
    """Rows per optimizer step, over all processes and accumulation steps together."""
    block: int = 256
    """Tokens per row and step: the gradient horizon. Long blocks are parallel training, short ones carry memory."""
    carry: bool = True
    """Carry each row's memory from block to block (text); off, every block starts empty."""
    accumulate: int = 1
    """Micro-batches per optimizer step; must divide batch."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for all weights, or Muon for the blocks' matrices and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 2e-2
    """Peak learning rate of Muon."""
    span_lr_scale: float = 1.0
    """The span predictors learn at lr times this."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Adam's running-mean factors."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup: int = 50
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "constant", "linear"] = "cosine"
    """Learning rate after the warm-up: down to final_lr along a cosine or a line, or constant."""
    decay_share: float = 1.0
    """With schedule=linear: the share of the steps, at the end, over which the rate falls."""
    final_lr: float = 0.1
    """Share of the peak learning rate left at the last step."""
    span_weight: float = 1e-6
    """Fixed weight of the span loss (alpha), used when no budget is set."""
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    """Budget controller; replaces span_weight when its target is set."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward and backward pass; with bf16, a GPU multiplies what stays in float32 as TF32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    graphs: bool = True
    """On one GPU, replay a step's kernels as a CUDA graph where memory is carried and its shapes are steady."""
    eval_every: int = 200
    """Steps between evaluations on the valid split; the last step always has one."""
    eval_batches: int = 8
    """Batches per evaluation during training."""
    test_batches: int | None = None
    """Batches of the final evaluation on the test split; None reads all of it, which a memory that only grows may not stand."""
    eval_batch: int | None = None
    """Rows side by side in evaluations; None takes batch."""
    eval_block: int | None = None
    """Tokens per row and forward pass in evaluations; None takes block."""
    checkpoint_every: int = 200
    """Steps between checkpoints; the last step always has one."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch",
            "block",
            "accumulate",
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "log_every",
        ):
            require(getattr(self, name) >= 1, f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("test_batches", "eval_batch", "eval_block"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {value}")
        require(
            self.batch % self.accumulate == 0,
            f"accumulate must divide batch, got accumulate {self.accumulate} and batch {self.batch}",
        )
        require(self.keep_checkpoints >= 2, f"keep_checkpoints must be at least 2, got {self.keep_checkpoints}")
        for name in ("lr", "muon_lr", "span_lr_scale"):
            require(getattr(self, name) > 0, f"{name} must be greater than 0, got {getattr(self, name)}")
        for name in ("warmup", "clip", "weight_decay", "span_weight"):
            require(getattr(self, name) >= 0, f"{name} must be 0 or more, got {getattr(self, name)}")
        require(0 < self.decay_share <= 1, f"decay_share must lie in (0, 1], got {self.decay_share}")


@dataclass(frozen=True)
class RunConfig:
    """A whole run: what is learned, by which model, how."""

    task: TaskConfig
    """The data and the score."""
    model: DecoderConfig
    """The decoder."""
    train: TrainConfig
    """The training."""
    seed: int = 0
    """Seed of weights, data order and noise."""


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""
    return dataclasses.asdict(config)


def from_dict(cls: Any, data: dict[str, Any]) -> Any:
    """The inverse of `to_dict`; unknown fields are refused with the nearest known name."""
    hints = typing.get_type_hints(cls)
    for name in data:
        if name not in hints:
            near = difflib.get_close_matches(name, hints, n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{cls.__name__} has no field {name}{advice}")
    return cls(**{name: _parse(hints[name], value) for name, value in data.items()})


def _parse(hint: Any, value: Any) -> Any:
    if isinstance(value, dict):
        return from_dict(_pick_class(hint, value), value)
    if typing.get_origin(hint) is tuple:
        return tuple(value)
    return value


def _pick_class(hint: Any, value: dict[str, Any]) -> Any:
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    members = tuple(m for m in members if dataclasses.is_dataclass(m))
    kinds = {getattr(m, "kind", None): m for m in members}
    if len(members) == 1 and "kind" not in value:
        return members[0]
    if value.get("kind") not in kinds:
        known = ", ".join(sorted(str(k) for k in kinds))
        raise ValueError(f"unknown kind {value.get('kind')!r}, known are: {known}")
    return kinds[value["kind"]]
