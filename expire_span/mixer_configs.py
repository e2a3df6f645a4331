"""Frozen dataclasses of the memory systems, each with a literal `kind`. Standard library only.

The first line of each docstring is the system's rule, as `expire-span memories` prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from expire_span.checks import require


@dataclass(frozen=True)
class ExpireSpanConfig:
    """Learned expiry: each memory gets, at birth, a span after which it fades out and is deleted."""

    kind: Literal["expire_span"] = "expire_span"
    max_span: int = 1024
    """Longest span a memory can be given, in steps (L)."""
    ramp: int = 32
    """Soft edge of the mask, in steps (R). Only memories on the ramp send gradient to the span predictor."""
    initial_span: float = 0.1
    """Share of max_span that every memory gets before training (p)."""
    initial_spread: float = 1.0
    """Longest over shortest initial span of a layer's heads, which lie in equal ratios around initial_span (kv_head only)."""
    min_span: float = 0.0
    """Shortest span, in steps, to which the sigmoid adds. Below 0, memories may be born on their ramp and live for less than
    it; at -ramp they would be born dead."""
    near_span: float | None = None
    """With reach learned: the shortest span of the heads beyond own_heads; None is min_span."""
    temperature: float = 1.0
    """Divides the predictor's input; above 1 it keeps one optimizer step from moving spans by thousands (tau)."""
    span_per: Literal["layer", "kv_head"] = "layer"
    """One span per memory shared by all heads of the layer, or one for each key/value head."""
    own_heads: int | None = None
    """With kv_head: so many heads of a layer have spans of their own, and all others share one more; None is all."""
    reach: Literal["fixed", "learned"] = "fixed"
    """The predictor's bias as one more weight, or (kv_head) as a reach in steps that each head learns as Adaptive-Span does;
    own_heads of them share it out among tokens, the others give all tokens the same."""
    shapes_states: bool = True
    """Whether the predictor's gradient also changes the hidden states that it reads; if not, it learns from them as they
    are, and costs less."""
    span_loss: Literal["ramp", "l1"] = "ramp"
    """How long spans are charged: while they are on the ramp (the released code's form), or all at birth (mean span)."""
    noisy: bool = False
    """In training, clamp all spans to one random share of max_span per forward pass; deletion still uses the unclamped."""
    include_self: bool = True
    """Whether a token attends to itself (the paper's does not)."""
    cap: int | None = None
    """Hard limit on stored memories per row; the smallest remaining span goes first. Such evictions are counted."""
    initial_memories: int = 0
    """Zero vectors that stand in the memory before the first token (the released code starts with a block of them)."""
    normalizer_eps: float = 0.0
    """Added to the attention normaliser, as a share of the living memories' unmasked sum (the released code uses 1e-8)."""
    impl: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """Implementation of the operator; auto takes triton on a GPU and chunked elsewhere."""

    def __post_init__(self) -> None:
        require(self.max_span >= 1, f"max_span must be at least 1, got {self.max_span}")
        require(self.ramp > 0, f"ramp must be greater than 0, got {self.ramp}")
        require(0 < self.initial_span < 1, f"initial_span must lie between 0 and 1, got {self.initial_span}")
        require(self.initial_spread >= 1, f"initial_spread must be at least 1, got {self.initial_spread}")
        longest = self.initial_span * self.initial_spread**0.5
        require(longest < 1, f"initial_span x sqrt(initial_spread) must lie below 1, got {longest:g}")
        apart = dict(initial_spread=self.initial_spread != 1, own_heads=self.own_heads is not None)
        for name, used in {**apart, "reach learned": self.reach == "learned"}.items():
            needs = f"{name} sets heads apart and needs span_per kv_head, got span_per {self.span_per}"
            require(not used or self.span_per == "kv_head", needs)
        require(self.own_heads is None or self.own_heads >= 1, f"own_heads must be at least 1, got {self.own_heads}")
        for name, span in (("min_span", self.min_span), ("near_span", self.near_span)):
            limits = f"between -ramp and max_span, {-self.ramp} and {self.max_span}"
            require(span is None or -self.ramp < span < self.max_span, f"{name} must lie {limits}, got {span}")
        beyond = f"reach learned and own_heads, got reach {self.reach} and own_heads {self.own_heads}"
        usable = self.reach == "learned" and self.own_heads is not None
        require(self.near_span is None or usable, f"near_span is of heads beyond own_heads and needs {beyond}")
        require(self.temperature > 0, f"temperature must be greater than 0, got {self.temperature}")
        require(self.cap is None or self.cap >= 1, f"cap must be at least 1, got {self.cap}")
        require(self.initial_memories >= 0, f"initial_memories must be 0 or more, got {self.initial_memories}")

    @property
    def nearest_span(self) -> float:
        """The shortest span of heads beyond own_heads."""
        return self.min_span if self.near_span is None else self.near_span


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        require(getattr(config, name) >= least, f"{name} must be at least {least}, got {getattr(config, name)}")


@dataclass(frozen=True)
class FullConfig:
    """Never forgets: every query reads every earlier token."""

    kind: Literal["full"] = "full"


@dataclass(frozen=True)
class TransformerXLConfig:
    """Fixed span: every query reads the last `span` steps, itself included; older memories are deleted."""

    kind: Literal["transformer_xl"] = "transformer_xl"
    span: int = 512
    """How many steps a memory lives, its own included (L)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "span")


@dataclass(frozen=True)
class AdaptiveSpanConfig:
    """A learned span per key/value head, the same for all its memories, with a soft edge."""

    kind: Literal["adaptive_span"] = "adaptive_span"
    max_span: int = 1024
    """Longest span a head can learn, in steps (L)."""
    ramp: int = 32
    """Soft edge of the mask, in steps (R)."""
    initial_span: float = 0.1
    """Share of max_span that every head starts with."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "max_span", "ramp")
        require(0 <= self.initial_span <= 1, f"initial_span must lie in [0, 1], got {self.initial_span}")


@dataclass(frozen=True)
class CompressiveConfig:
    """A window of raw memories; groups that leave it are pooled to one, and live on in a second queue."""

    kind: Literal["compressive"] = "compressive"
    window: int = 256
    """Steps a memory is kept as it is; it leaves with its group, so up to rate - 1 steps later."""
    compressed: int = 256
    """How many pooled memories are kept."""
    rate: int = 4
    """How many memories become one (c)."""
    pooling: Literal["mean", "max", "conv"] = "mean"
    """How a group's hidden states become one: their mean, their largest, or a learned convolution."""
    reconstruction: bool = False
    """Add the loss that asks pooled memories to answer today's queries as the raw ones would; it trains the pooling only."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "window", "compressed", "rate")
        learned = not self.reconstruction or self.pooling == "conv"
        require(learned, f"reconstruction trains a learned pooling, got pooling {self.pooling}; use conv")


@dataclass(frozen=True)
class SlidingWindowConfig:
    """Every query reads the last `window` tokens, held in a ring of exactly that size."""

    kind: Literal["sliding_window"] = "sliding_window"
    window: int = 512
    """Tokens a query reads, itself included."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "window")


@dataclass(frozen=True)
class LongformerConfig:
    """A window that grows with depth, some heads dilated, and global first tokens that all queries read."""

    kind: Literal["longformer"] = "longformer"
    window: int = 128
    """Tokens a query reads in the first layer, itself included."""
    growth: float = 1.5
    """Each layer's window is the one below times this."""
    max_window: int = 1024
    """No layer's window is larger."""
    dilation: int = 4
    """Dilated heads read every so-many-th token, and so reach as many times further."""
    dilated_heads: int = 0
    """How many key/value heads are dilated."""
    global_tokens: int = 1
    """The first tokens of a row that every later query reads."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "window", "max_window", "dilation")
        _at_least(self, 0, "dilated_heads", "global_tokens")
        require(self.growth >= 1, f"growth must be at least 1, got {self.growth}")


@dataclass(frozen=True)
class BigBirdConfig:
    """The last blocks, the first blocks, and some random earlier blocks that a fixed seed picks."""

    kind: Literal["bigbird"] = "bigbird"
    block: int = 64
    """Tokens of a block."""
    window_blocks: int = 3
    """How many of the last blocks are read, the query's own included."""
    global_blocks: int = 1
    """How many first blocks are read by all."""
    random_blocks: int = 2
    """How many random earlier blocks each query block reads."""
    seed: int = 0
    """Picks the random blocks."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "block", "window_blocks")
        _at_least(self, 0, "global_blocks", "random_blocks", "seed")


@dataclass(frozen=True)
class LinearConfig:
    """Linear attention: running sums of phi(k) v and phi(k), with phi = elu + 1; rotary positions turn phi."""

    kind: Literal["linear"] = "linear"
    chunk: int = 64
    """Tokens that training handles at once; it does not change the result."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "chunk")


@dataclass(frozen=True)
class PerformerConfig:
    """Linear attention whose positive random features estimate softmax attention without bias."""

    kind: Literal["performer"] = "performer"
    features: int = 128
    """Random features per head; more give a better estimate."""
    seed: int = 0
    """Draws the features; they are saved with the weights."""
    chunk: int = 64
    """Tokens that training handles at once; it does not change the result."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "features", "chunk")


@dataclass(frozen=True)
class RoutingConfig:
    """Tokens are routed to the nearest of learned centroids and read the last members of their own cluster."""

    kind: Literal["routing"] = "routing"
    clusters: int = 16
    """Centroids per head; about the square root of the sequence length."""
    members: int = 64
    """Members of a cluster that are kept and read (w)."""
    window: int = 64
    """Tokens that the local heads read."""
    local_heads: int | None = None
    """Heads that read a window instead of a cluster; None means half."""
    decay: float = 0.999
    """Share of the old centroid that a training step keeps; 1 freezes the centroids."""
    selection: Literal["recent", "top"] = "recent"
    """Training reads a cluster's last members, as streaming does, or its closest in the whole block (the original's, which
    looks ahead and reads no carried memory)."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "clusters", "members", "window")
        require(0 <= self.decay <= 1, f"decay must lie in [0, 1], got {self.decay}")
        heads = self.local_heads
        require(heads is None or heads >= 0, f"local_heads must be 0 or more, got {heads}")


@dataclass(frozen=True)
class ReformerConfig:
    """Queries are hashed into buckets and read the last members of their own bucket; several rounds are merged."""

    kind: Literal["reformer"] = "reformer"
    buckets: int = 16
    """Buckets per round: 1, or an even number."""
    rounds: int = 2
    """Independent hashes whose results are merged."""
    members: int = 64
    """Members of a bucket that are kept and read."""
    selection: Literal["recent", "chunks"] = "recent"
    """Training reads a bucket's last members, as streaming does, or the own and the previous chunk of the sorted block (the
    original's, where later tokens shift the chunks)."""
    seed: int = 0
    """Draws the hashes; they are saved with the weights."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "buckets", "rounds", "members")
        require(self.buckets == 1 or self.buckets % 2 == 0, f"buckets must be 1 or even, got {self.buckets}")


@dataclass(frozen=True)
class _RecurrentConfig:
    hidden: int | None = None
    """Size of the recurrent state; None takes the model's dim."""

    def __post_init__(self) -> None:
        require(self.hidden is None or self.hidden >= 1, f"hidden must be at least 1, got {self.hidden}")


@dataclass(frozen=True)
class TanhRNNConfig(_RecurrentConfig):
    """One vector, overwritten every step: h = tanh(W x + U h' + b)."""

    kind: Literal["tanh_rnn"] = "tanh_rnn"


@dataclass(frozen=True)
class GRUConfig(_RecurrentConfig):
    """One gated vector: h = (1 - z) h' + z c with c = tanh(W x + U (r h') + b)."""

    kind: Literal["gru"] = "gru"


@dataclass(frozen=True)
class TorchGRUConfig(_RecurrentConfig):
    """One gated vector as torch.nn.GRU has it: h = z h' + (1 - z) c with c = tanh(W x + b + r (U h' + b'))."""

    kind: Literal["gru_torch"] = "gru_torch"


@dataclass(frozen=True)
class LSTMConfig(_RecurrentConfig):
    """Two vectors: a cell that gates keep or overwrite, and what an output gate shows of it."""

    kind: Literal["lstm"] = "lstm"


@dataclass(frozen=True)
class ForgettingConfig:
    """Never deletes, but fades: scores get the sum of log forget gates since the memory was written."""

    kind: Literal["forgetting"] = "forgetting"
    initial_gate: float = 0.99
    """Forget gate of every head before training: the share of weight a memory keeps each step."""
    chunk: int = 512
    """Queries that are scored at once; it does not change the result."""

    def __post_init__(self) -> None:
        require(0 < self.initial_gate < 1, f"initial_gate must lie between 0 and 1, got {self.initial_gate}")
        _at_least(self, 1, "chunk")


@dataclass(frozen=True)
class StreamingSinksConfig:
    """The first tokens of a row, and the last `window`."""

    kind: Literal["streaming_sinks"] = "streaming_sinks"
    sinks: int = 4
    """First tokens that stay for ever (k)."""
    window: int = 508
    """Tokens a query reads besides, itself included."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "sinks")
        _at_least(self, 1, "window")


MixerConfig = (
    ExpireSpanConfig
    | FullConfig
    | TransformerXLConfig
    | AdaptiveSpanConfig
    | CompressiveConfig
    | SlidingWindowConfig
    | LongformerConfig
    | BigBirdConfig
    | LinearConfig
    | PerformerConfig
    | RoutingConfig
    | ReformerConfig
    | TanhRNNConfig
    | GRUConfig
    | TorchGRUConfig
    | LSTMConfig
    | ForgettingConfig
    | StreamingSinksConfig
)
"""Any memory system's config; each has a literal `kind`."""

MIXER_CONFIGS: dict[str, Any] = {cls.kind: cls for cls in MixerConfig.__args__}
"""Every memory system's config class by kind."""


POSITION_FREE = frozenset({"linear", "performer", "tanh_rnn", "gru", "gru_torch", "lstm"})
"""Systems without a score for each pair of tokens, which learned relative positions would add to."""
LIFETIMES = frozenset({"expire_span", "full", "transformer_xl", "adaptive_span"})
"""Systems that run on the expiring-attention operator."""


def mixer_config(kind: str, **fields: Any) -> Any:
    """The config of a kind; an unknown one lists those there are."""
    require(kind in MIXER_CONFIGS, f"unknown mixer {kind!r}, known are: {', '.join(MIXER_CONFIGS)}")
    return MIXER_CONFIGS[kind](**fields)
