"""What each memory system keeps and what it costs: the rows of `expire-span memories` and of docs/memories.md.

Standard library only. Bytes are those of one row of a batch, over all layers; stores that grow hold up to half as much again as
spare room.
"""

from __future__ import annotations

from typing import Any

from expire_span.config import BackboneConfig, DecoderConfig, RunConfig
from expire_span.models.systems import SYSTEMS, StateSize, find
from expire_span.sizes import show_bytes

STEPS = (1_000, 16_000, 1_000_000)
"""Lengths of stream for which docs/memories.md gives bytes."""


def _sizes(model: BackboneConfig, element: int = 4) -> list[StateSize]:
    """One for each layer of a model."""
    return [StateSize(model.shape(n), settings, element) for n, settings in enumerate(model.mixers)]


def state_bytes(model: BackboneConfig, steps: int, element: int = 4) -> int:
    """Bytes that one row of a model holds after so many steps, over all layers."""
    return sum(find(size.settings.kind).held(size, steps) for size in _sizes(model, element))


def receptive_field_of(model: BackboneConfig) -> int | None:
    """The most steps back that can matter to a model's output: what its layers read adds up. None: no limit.

    A layer without pairs of tokens (a recurrent one) carries anything that it was given, so it has no limit.
    """
    fields = [find(size.settings.kind).receptive_field(size) for size in _sizes(model)]
    return None if None in fields else sum(field for field in fields if field is not None)


def find_limits(config: RunConfig) -> list[str]:
    """What a memory system cannot do on a task, whatever it learns, in a sentence each."""
    kind, field, needs = (
        config.model.mixer.kind,
        receptive_field_of(config.model),
        getattr(config.task, "farthest", None),
    )
    limits = []
    if field is not None and needs is not None and field < needs:
        task = f"{config.task.kind} asks for up to {needs}"
        limits.append(f"{kind} sees {field} steps back at most, and {task}: beyond that it can only guess")
    for settings in {m.kind: m for m in config.model.mixers}.values():
        if getattr(settings, "selection", "recent") != "recent":
            more = f"{settings.kind} sees more in training than in use, {find(settings.kind).training}"
            limits.append(f"{more}: its training loss is not what it scores")
    return limits


def describe(kind: str) -> dict[str, Any]:
    """One system as plain values."""
    m = find(kind)
    told = {"kind": kind, "rule": m.rule, "state": m.state, "cost": m.cost, "streaming": m.streaming}
    return told | {"training_sees_more": m.training, "bounded": m.bounded}


def as_markdown() -> str:
    """The table of docs/memories.md: each system with its default settings in a 12-layer model of 512 with 8 heads."""
    heads = ("kind", "rule", "state of a row and layer", *(_steps(n) for n in STEPS))
    heads = (*heads, "cost", "streaming", "training sees more")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for kind, m in SYSTEMS.items():
        model = DecoderConfig.modern(dim=512, layers=12, heads=8, ff_dim=2048, mixer=m.settings())
        held = [show_bytes(state_bytes(model, n)) for n in STEPS]
        cells = (f"`{kind}`", m.rule, m.state, *held, m.cost, m.streaming, m.training)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _steps(count: int) -> str:
    return f"{count // 1_000_000}M steps" if count >= 1_000_000 else f"{count // 1_000}k steps"
