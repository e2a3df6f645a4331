"""`expire-span analyse RUN`: three questions about a model trained on text, answered with counts and confidence intervals.

1. Which tokens live longest in each layer? Mean span of each class of letters.
2. What does a word's span depend on? The spans of a name, and of other words in its place.
3. What gets worse if no span may exceed a limit? Additional bits per letter, by class.

The answers are written to analysis.json in the run folder, with pictures beside it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span import __version__
from expire_span.disk.files import to_json, write_together
from expire_span.errors import StorageError, describe
from expire_span.runs import RunFolder, UserError

from .classes import CLASSES, classify, find_names
from .intervals import class_means, mean_of
from .reading import TextModel, TextReading

FORMAT = 1
FILE = "analysis.json"
WORD, REPLACEMENTS = "Egypt", ("somewhere", "Humpty Dumpty")
"""The paper's example: a place name, a word without content, and a name that is unexpected there."""
BEFORE, AFTER = 400, 100
"""Number of letters of the passage before and after the word."""
PASSAGES = 16
"""Largest number of places at which the word is replaced."""
TOP = 12
"""Number of longest-lived tokens listed for each layer, and of letters that lose most by a cut."""
CUTS = (16, 64, 256)
"""Spans are cut to max_span divided by each of these."""


def analyse(
    run: RunFolder,
    *,
    count: int,
    word: str | None = None,
    limits: Sequence[float] = (),
    device: Any = "cpu",
    raw: bytes | None = None,
) -> dict[str, Any]:
    """Read the first `count` letters of the test split, or of `raw`, and answer the three questions.

    word: the word to replace; None chooses one. limits: spans to which to cut; empty takes those of `CUTS`.
    """
    model = TextModel.open(run, count, device, raw)
    reading = model.read(model.tokens)
    if not reading.spans:
        kind = run.config.model.mixer.kind
        raise UserError(f"the memory system {kind} gives tokens no spans; analyse a run that learned them")
    if len(reading.text) < 2:
        raise UserError(f"the test split has {len(reading.text)} tokens, and analyse needs at least 2")
    classes = classify(reading.text)
    found: dict[str, Any] = {"format": FORMAT, "version": __version__, "run": run.name, "tokens": len(reading.text)}
    found["layers"] = [rank_layer(reading, layer, classes) for layer in reading.spans]
    found["replaced"] = replace_word(model, reading.text, word)
    found["cut"] = [cut_spans(model, reading, limit, classes) for limit in limits or default_limits(run)]
    return found


def default_limits(run: RunFolder) -> list[float]:
    longest = max(getattr(m, "max_span", 0) for m in run.config.model.mixers)
    return sorted({max(1.0, longest // part) for part in CUTS}, reverse=True)


def rank_layer(reading: TextReading, layer: int, classes: np.ndarray) -> dict[str, Any]:
    """Spans of one layer: the mean of each class, and the tokens that live longest."""
    spans = np.maximum(reading.spans[layer], 0)
    means = class_means(spans, classes, len(CLASSES))
    order = np.argsort(-spans, kind="stable")[:TOP]
    top = [{"place": int(n), "span": float(spans[n]), "around": around(reading.text, int(n))} for n in order]
    rows = [{"class": name, **mean} for name, mean in zip(CLASSES, means)]
    return {"layer": layer, "mean": float(spans.mean()), "classes": rows, "longest": top}


def around(text: str, place: int, width: int = 12) -> list[str]:
    """The letters before a place, the one at it, and those after."""
    return [text[max(place - width, 0) : place], text[place], text[place + 1 : place + 1 + width]]


def replace_word(model: TextModel, text: str, word: str | None) -> dict[str, Any] | None:
    """Spans of a word's letters and of the letter after it, and of the same letters of the words that replace it."""
    word = word or choose_word(text)
    if word is None:
        return None
    places = [match.start() for match in re.finditer(rf"\b{re.escape(word)}\b", text)]
    if not places:
        raise UserError(f"the text of {len(text):,} letters does not have the word {word!r}; give another --word")
    chosen = places[:PASSAGES]
    variants = [measure_word(model, text, chosen, word, other) for other in (word, *REPLACEMENTS)]
    first = chosen[0]
    passage = [text[max(first - BEFORE, 0) : first], word, text[first + len(word) : first + len(word) + AFTER]]
    return {"word": word, "occurrences": len(places), "passages": len(chosen), "passage": passage, "words": variants}


def choose_word(text: str) -> str | None:
    """The paper's word where the text has it, else the commonest name of five letters or more."""
    if re.search(rf"\b{WORD}\b", text):
        return WORD
    names = Counter(text[start:end] for start, end in find_names(text) if end - start >= 5)
    return min(names, key=lambda name: (-names[name], name)) if names else None


def measure_word(model: TextModel, text: str, places: Sequence[int], word: str, other: str) -> dict[str, Any]:
    """Mean span, layer by layer, of the letters of `other` where `word` stood, over all passages."""
    spans: dict[int, list[float]] = {}
    for place in places:
        before, after = text[max(place - BEFORE, 0) : place], text[place + len(word) : place + len(word) + AFTER]
        tokens = model.tokens[max(place - BEFORE, 0) : place + len(word) + len(after)]
        head, tail = tokens[: len(before)], tokens[len(before) + len(word) :]
        middle = tokens[len(before) : len(before) + len(word)] if other == word else model.encode(other)
        found = model.read(torch.cat([head, middle, tail]))
        inside = slice(len(before), len(before) + len(other) + 1)
        for layer, values in found.spans.items():
            spans.setdefault(layer, []).append(float(np.maximum(values[inside], 0).mean()))
    layers = [{"layer": layer, **mean_of(np.array(values))} for layer, values in spans.items()]
    return {"word": other, "layers": layers}


def cut_spans(model: TextModel, reading: TextReading, limit: float, classes: np.ndarray) -> dict[str, Any]:
    """Additional bits per letter when no span exceeds `limit`, by class, and the places with the largest increase."""
    short = model.read(model.tokens, limit)
    worse = (short.bits - reading.bits)[1:]
    means = class_means(worse, classes[1:], len(CLASSES))
    order = 1 + np.argsort(-worse, kind="stable")[:TOP]
    top = [{"place": int(n), "bits": float(worse[n - 1]), "around": around(reading.text, int(n))} for n in order]
    rows = [{"class": name, **mean} for name, mean in zip(CLASSES, means)]
    before, after = float(reading.bits[1:].mean()), float(short.bits[1:].mean())
    return {"limit": limit, "bits": before, "bits_cut": after, "classes": rows, "worst": top}


def write_analysis(folder: Path, found: dict[str, Any]) -> list[Path]:
    """Write analysis.json and the pictures: all of them, or none."""
    from .pictures import draw_all

    pictures = draw_all(found)
    files = {FILE: to_json(found), **{f"analysis_{name}.png": data for name, data in pictures.items()}}
    try:
        return write_together(folder, files)
    except OSError as error:
        raise StorageError(f"cannot write {folder}: {describe(error)}; give another --out") from error
