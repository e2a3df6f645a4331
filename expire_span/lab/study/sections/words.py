"""Sections of the word study's page."""

from __future__ import annotations

from typing import Any

import numpy as np

from expire_span.lab.study import charts
from expire_span.lab.study.page import Section


def draw_sections(result: dict[str, Any]) -> list[Section]:
    return [_heat(result), _stretches(result)]


def best_layer(model: dict[str, Any]) -> int:
    """The layer whose units have the longest stretches."""
    return int(np.argmax([layer["steadiest_tenth"] for layer in model["trained"]]))


def _heat(result: dict[str, Any]) -> Section:
    model = result["models"][0]
    layer = best_layer(model)
    pictures = []
    for kind, title in (("trained", "After training"), ("untrained", "Before training")):
        part = model[kind][layer]
        longest = part["stretches"][0]
        caption = (
            f"Layer {layer + 1} of seed {model['seed']}, {kind}. One row a unit, scaled to its own range. The "
            f"steadiest unit holds still for {longest:.1f} words on average, the mean unit for {part['mean']:.2f}."
        )
        pictures.append((caption, charts.draw_heat(np.array(part["states"]), model["words"], title)))
    text = (
        f"A passage of unseen text, {len(model['words'])} words. Rows of one colour over many words are memory in "
        "action. The order of the units is each picture's own: the steadiest at the top."
    )
    return Section("The hidden state over a passage", text, pictures)


def _stretches(result: dict[str, Any]) -> Section:
    models = result["models"]
    groups = {
        kind: [np.concatenate([layer["stretches"] for layer in model[kind]]) for model in models]
        for kind in ("trained", "untrained")
    }
    text = (
        f"A stretch is a run of words over which a unit stays within {result['eps']:.0%} of its range on a passage of "
        f"{result['passage']} words. Over {len(models)} seeds, all units: {spread(groups['trained'])} words in the "
        f"trained models, {spread(groups['untrained'])} in the same models before training. Held means stretches of "
        f"{result['held']} words or more: the share of all places (unit, word) that lie in one."
    )
    columns = ("mean stretch", "steadiest tenth", "held")
    rows = [["seed", "layer", *(f"{kind}: {name}" for kind in groups for name in columns), "perplexity"]]
    for model in models:
        for n, parts in enumerate(zip(model["trained"], model["untrained"])):
            row = [str(model["seed"]), str(n + 1)]
            for part in parts:
                row += [f"{part['mean']:.2f}", f"{part['steadiest_tenth']:.2f}", f"{part['held_share']:.1%}"]
            rows.append([*row, f"{model['perplexity']:.2f}"])
    picture = ("One line a seed, the units of all layers.", charts.draw_stretches(groups))
    return Section("How long units hold still", text, [picture], rows)


def spread(models: list[np.ndarray]) -> str:
    """Mean over models and its range."""
    means = [float(np.mean(stretches)) for stretches in models]
    return f"{np.mean(means):.2f} ({min(means):.2f} to {max(means):.2f})"
