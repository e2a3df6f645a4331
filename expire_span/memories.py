"""What each memory system keeps and what it costs: the table of `expire-span memories` and of docs/memories.md.

This module needs the standard library only. Bytes are those of one row of a batch, summed over all layers. They count the slots
in use: a store that grows allocates up to half as much again as spare slots.
"""

from __future__ import annotations

from typing import Any

from expire_span.disk.sizes import show_bytes
from expire_span.models.systems import SYSTEMS, StateSize, find
from expire_span.settings.run import BackboneConfig, DecoderConfig, RunConfig

STEPS = (1_000, 16_000, 1_000_000)
"""Lengths of stream for which docs/memories.md gives bytes."""


def _sizes(model: BackboneConfig, element: int = 4) -> list[StateSize]:
    """One `StateSize` for each layer of a model; `element` is the number of bytes of one number in the state."""
    return [StateSize(model.shape(n), settings, element) for n, settings in enumerate(model.mixers)]


def state_bytes(model: BackboneConfig, steps: int, element: int = 4) -> int:
    """Bytes that one row of a model's state holds after `steps` steps, over all layers."""
    return sum(find(size.settings.kind).held(size, steps) for size in _sizes(model, element))


def receptive_field_of(model: BackboneConfig) -> int | None:
    """The most steps back from which a token can affect the model's output: the sum of its layers' receptive fields.

    None means no limit. A recurrent layer has none, since its state can carry information over any number of steps.
    """
    fields = [find(size.settings.kind).receptive_field(size) for size in _sizes(model)]
    return None if None in fields else sum(field for field in fields if field is not None)


def find_limits(config: RunConfig) -> list[str]:
    """Sentences that say what this run's memory system cannot do on its task, whatever it learns; an empty list if nothing."""
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
    """One memory system's declaration as a dictionary of strings and flags, for `expire-span memories --json`."""
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
