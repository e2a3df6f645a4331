"""What each memory system keeps and what it costs: the rows of `expire-span memories` and of docs/memories.md.

Standard library only. Bytes are those of one row of a batch in one layer; stores that grow hold up to half as much again
as spare room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expire_span.config import DecoderConfig, RunConfig
from expire_span.mixer_configs import MIXER_CONFIGS

STEPS = (1_000, 16_000, 1_000_000)
"""Lengths of stream for which docs/memories.md gives bytes."""
EXACT = "exact"


@dataclass(frozen=True)
class Memory:
    """One memory system, in words and numbers."""

    kind: str
    state: str
    """What a row holds in one layer, as a formula."""
    held: Callable[[Sizes, int], int]
    """The same in bytes, after so many steps; an upper bound where spans are learned."""
    cost: str
    """Work for a sequence of T tokens."""
    streaming: str = EXACT
    """Whether feeding a sequence in any pieces gives the outputs of feeding it whole."""
    training: str = "nothing"
    """What training sees and streaming does not."""
    bounded: bool = True
    """Whether the state stops growing."""
    reach: Callable[[Sizes], int | None] = lambda s: None
    """The most steps back from which one layer reads; None where there is no limit."""

    @property
    def rule(self) -> str:
        return (MIXER_CONFIGS[self.kind].__doc__ or "").strip().splitlines()[0]


@dataclass(frozen=True)
class Sizes:
    """The numbers that formulas are made of."""

    model: DecoderConfig
    layer: int = 0
    element: int = 4
    """Bytes of a number."""

    @property
    def rule(self) -> Any:
        return self.model.mixer

    @property
    def head(self) -> int:
        """A key and a value of one head."""
        return 2 * self.model.head_dim * self.element

    @property
    def pair(self) -> int:
        """A key and a value of all key/value heads."""
        return self.model.num_kv_heads * self.head

    @property
    def vector(self) -> int:
        """One recurrent state."""
        return (getattr(self.rule, "hidden", None) or self.model.dim) * self.element


def _compressive(s: Sizes, n: int) -> int:
    c = s.rule.rate
    raw = c * -(-(s.rule.window + c - 1) // c)
    slots = raw + c - 1 + s.rule.compressed + raw // c
    return slots * (s.pair + 8) + (c - 1) * s.model.dim * s.element + 8


def _compressive_reach(s: Sizes) -> int:
    """The window, the rest of the group that its end lies in, and the pooled groups."""
    return s.rule.window + s.rule.rate - 2 + s.rule.rate * s.rule.compressed


def _longformer_window(s: Sizes) -> int:
    return min(round(s.rule.window * s.rule.growth**s.layer), s.rule.max_window)


def _longformer_reach(s: Sizes) -> int | None:
    m = s.rule
    return None if m.global_tokens else (_longformer_window(s) - 1) * (m.dilation if m.dilated_heads else 1)


def _longformer(s: Sizes, n: int) -> int:
    m, window = s.rule, _longformer_window(s)
    near, far = s.model.num_kv_heads - m.dilated_heads, m.dilated_heads
    rings = sum(reach * (heads * s.head + 8) for heads, reach in ((near, window), (far, window * m.dilation)) if heads)
    return rings + m.global_tokens * (s.pair + 8) + 8


def _routing(s: Sizes, n: int) -> int:
    m = s.rule
    local = s.model.heads // 2 if m.local_heads is None else m.local_heads
    routed = (s.model.heads - local) * m.clusters * m.members * (s.head + 8)
    return routed + m.window * (local * s.head + 8) + 8


def _sums(s: Sizes, features: int) -> int:
    return s.model.num_kv_heads * features * (s.model.head_dim + 1) * s.element + 8


MEMORIES = {
    memory.kind: memory
    for memory in (
        Memory(
            "expire_span",
            "living memories x (2 Hkv D e + 12), at most max_span + ramp of them",
            lambda s, n: min(n, s.rule.max_span + s.rule.ramp, s.rule.cap or n) * (s.pair + 12),
            "O(T x living)",
            streaming="exact; under a cap, evictions are counted",
            training="with a cap, memories that the cap would have evicted",
            reach=lambda s: s.rule.max_span + s.rule.ramp - 1,
        ),
        Memory("full", "n x (2 Hkv D e + 12)", lambda s, n: n * (s.pair + 12), "O(T^2)", bounded=False),
        Memory(
            "transformer_xl",
            "min(n, span) x (2 Hkv D e + 12)",
            lambda s, n: min(n, s.rule.span) * (s.pair + 12),
            "O(T x span)",
            reach=lambda s: s.rule.span - 1,
        ),
        Memory(
            "adaptive_span",
            "per head: min(n, its span + ramp) x (2 D e + 12)",
            lambda s, n: min(n, s.rule.max_span + s.rule.ramp) * s.model.num_kv_heads * (s.head + 12),
            "O(T x longest span)",
            reach=lambda s: s.rule.max_span + s.rule.ramp - 1,
        ),
        Memory(
            "compressive",
            "(window + compressed + window / rate, rounded up to groups) x (2 Hkv D e + 8)",
            _compressive,
            "O(T x (window + compressed))",
            reach=_compressive_reach,
        ),
        Memory(
            "sliding_window",
            "window x (2 Hkv D e + 8)",
            lambda s, n: s.rule.window * (s.pair + 8) + 8,
            "O(T x window)",
            reach=lambda s: s.rule.window - 1,
        ),
        Memory(
            "longformer",
            "per head: window x dilation x 2 D e, and global_tokens x 2 Hkv D e",
            _longformer,
            "O(T x (window + global_tokens))",
            reach=_longformer_reach,
        ),
        Memory(
            "bigbird",
            "n x (2 Hkv D e + 12): any past block may be drawn later",
            lambda s, n: n * (s.pair + 12) + 8,
            "O(T x block x (window + global + random blocks))",
            bounded=False,
        ),
        Memory("linear", "Hkv D (D + 1) e", lambda s, n: _sums(s, s.model.head_dim), "O(T D^2)"),
        Memory("performer", "Hkv features (D + 1) e", lambda s, n: _sums(s, s.rule.features), "O(T D features)"),
        Memory(
            "routing",
            "routed heads x clusters x members x (2 D e + 8), and window x local heads x 2 D e",
            _routing,
            "O(T (members + window)) and a sort",
            training="with selection=top: each cluster's closest tokens of the whole block, later ones included",
        ),
        Memory(
            "reformer",
            "rounds x H x buckets x members x (2 D e + 8)",
            lambda s, n: s.rule.rounds * s.model.heads * s.rule.buckets * s.rule.members * (s.head + 8),
            "O(T x rounds x members) and a sort",
            training="with selection=chunks: chunks of the sorted block, whose borders later tokens shift",
        ),
        Memory("tanh_rnn", "hidden x e", lambda s, n: s.vector, "O(T hidden^2), step after step"),
        Memory("gru", "hidden x e", lambda s, n: s.vector, "O(T hidden^2), step after step"),
        Memory("gru_torch", "hidden x e", lambda s, n: s.vector, "O(T hidden^2), step after step"),
        Memory("lstm", "2 x hidden x e", lambda s, n: 2 * s.vector, "O(T hidden^2), step after step"),
        Memory(
            "forgetting",
            "n x (2 Hkv D e + 8 H + 12)",
            lambda s, n: n * (s.pair + 8 * s.model.heads + 12) + 8 * s.model.heads,
            "O(T^2)",
            bounded=False,
        ),
        Memory(
            "streaming_sinks",
            "(sinks + window) x (2 Hkv D e + 8)",
            lambda s, n: (s.rule.sinks + s.rule.window) * (s.pair + 8) + 8,
            "O(T x (window + sinks))",
            reach=lambda s: None if s.rule.sinks else s.rule.window - 1,
        ),
    )
}
"""Every memory system by kind, in the order of the registry."""


def state_bytes(model: DecoderConfig, steps: int, element: int = 4) -> int:
    """Bytes that one row of a decoder holds after so many steps, over all layers."""
    held = MEMORIES[model.mixer.kind].held
    return sum(held(Sizes(model, layer, element), steps) for layer in range(model.layers))


def reach_of(model: DecoderConfig) -> int | None:
    """The most steps back that can matter to a decoder's output: what its layers read adds up. None: no limit."""
    reaches = [MEMORIES[model.mixer.kind].reach(Sizes(model, layer)) for layer in range(model.layers)]
    return None if None in reaches else sum(reach for reach in reaches if reach is not None)


def find_limits(config: RunConfig) -> list[str]:
    """What a memory system cannot do on a task, whatever it learns, in a sentence each."""
    kind, reach, needs = config.model.mixer.kind, reach_of(config.model), getattr(config.task, "farthest", None)
    limits = []
    if reach is not None and needs is not None and reach < needs:
        task = f"{config.task.kind} asks for up to {needs}"
        limits.append(f"{kind} sees {reach} steps back at most, and {task}: beyond that it can only guess")
    if getattr(config.model.mixer, "selection", "recent") != "recent":
        limits.append(
            f"{kind} sees more in training than in use, {MEMORIES[kind].training}: its training loss is not what it scores"
        )
    return limits


def describe(kind: str) -> dict[str, Any]:
    """One system as plain values."""
    m = MEMORIES[kind]
    told = {"kind": kind, "rule": m.rule, "state": m.state, "cost": m.cost, "streaming": m.streaming}
    return told | {"training_sees_more": m.training, "bounded": m.bounded}


def as_markdown() -> str:
    """The table of docs/memories.md: each system with its default settings in a 12-layer model of 512 with 8 heads."""
    heads = ("kind", "rule", "state of a row and layer", *(_steps(n) for n in STEPS))
    heads = (*heads, "cost", "streaming", "training sees more")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for kind, m in MEMORIES.items():
        model = DecoderConfig.modern(dim=512, layers=12, heads=8, ff_dim=2048, mixer=MIXER_CONFIGS[kind]())
        held = [_short(state_bytes(model, n)) for n in STEPS]
        cells = (f"`{kind}`", m.rule, m.state, *held, m.cost, m.streaming, m.training)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _steps(count: int) -> str:
    return f"{count // 1_000_000}M steps" if count >= 1_000_000 else f"{count // 1_000}k steps"


def _short(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
