"""One sample read by a trained decoder: the tokens, and the span that each layer gave to each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from expire_span.models.decoder import Decoder
from expire_span.tasks.contract import Task
from expire_span.tasks.gridworlds.sentences import kind_of
from expire_span.tasks.signs import show_line

from .trace import Trace
from .tracer import Tracer

EPISODES = 16
"""Number of test batches among which the longest is the sample of a task of episodes."""


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    """[T]."""
    labels: list[str]
    spans: np.ndarray
    """[layers, T], in steps; with a span per head, the longest."""
    dies: np.ndarray
    """The step at which each memory is dead, [layers, T]; with several heads, the last."""
    vocabulary: str = "symbols"
    """What its tokens are, as in the header of a trace."""

    def lifetimes(self, layer: int) -> np.ndarray:
        """Steps for which each memory can be read, its own included."""
        return self.dies[layer] - np.arange(self.dies.shape[1])

    @property
    def longest_layer(self) -> int:
        """The layer that holds a single memory longest."""
        return int(self.spans.max(1).argmax())

    @property
    def kinds(self) -> list[str]:
        """What each token is: the kind of a sentence, or the first word of its label, where labels have several words."""
        several = any(" " in label for label in self.labels)
        if not several:
            return ["memory"] * len(self.labels)
        return [kind_of(label) or label.split()[0] for label in self.labels]


def sample_of(task: Task, seed: int) -> tuple[Tensor, dict[int, int]]:
    """A part of the test data, [T], and the target token at each position that the task scores.

    Of a text it is the beginning, of episodes the longest of a few, with a cue where not all have one.
    """
    codec, stream = task.codec, task.stream("test", batch=1, block=task.longest, seed=seed)
    if codec.unit != "symbol":
        return next(iter(stream)).x[0], {}
    batches = [batch for batch, _ in zip(stream, range(EPISODES))]
    with_cue = [x for x in batches if any(label.startswith("cue") for label in codec.show(x.x[0]))]
    best = max(with_cue or batches, key=lambda batch: batch.x.shape[1])
    return best.x[0], {n: int(best.y[0, n]) for n in best.mask[0].nonzero().flatten().tolist()}


def read_sample(decoder: Decoder, task: Task, seed: int) -> Sample:
    """The task's sample through the decoder with memory carried."""
    tokens, answers = sample_of(task, seed)
    tracer = Tracer(decoder, name="", task="", codec=task.codec)
    return sample_from(Trace.of([tracer.header(), *tracer.read(tokens, answers)]))


def sample_from(trace: Trace) -> Sample:
    """Tokens and spans of a trace; with a span per head, the longest."""
    tokens = np.array([step["token"] for step in trace.steps])
    labels = [step["text"] for step in trace.steps]
    return Sample(tokens, labels, trace.spans.max(1), trace.dies.max(1), trace.header["vocabulary"])


def marks_of(sample: Sample) -> dict[int, str]:
    """Positions of a sample to highlight, with their labels: the question, and the cues that are kept longest, far enough
    apart for their labels not to overlap. Neighbouring steps may see the same cue."""
    if sample.vocabulary != "symbols":
        return {}
    places = [n for n, label in enumerate(sample.labels) if label.startswith(("cue", "which"))]
    lives, found = sample.spans.max(0), dict[int, str]()
    for place in sorted(places, key=lambda n: (not sample.labels[n].startswith("which"), -lives[n])):
        if all(abs(place - other) > len(sample.labels) / 16 for other in found):
            found[place] = sample.labels[place]
    return dict(sorted(found.items()))


# What lives longest


def long_words(sample: Sample, layer: int, width: int, *, count: int = 8) -> dict[int, str]:
    """Words that a layer keeps longest, each at its longest-lived byte, far enough apart for their labels not to overlap."""
    if sample.vocabulary != "bytes":
        return {}
    raw, spans, found = sample.tokens[:width].astype(np.uint8).tobytes(), sample.spans[layer], dict[int, str]()
    words = [match.span() for match in re.finditer(rb"[0-9A-Za-z\x80-\xff]{3,}", raw)]
    for start, end in sorted(words, key=lambda place: -spans[place[0] : place[1]].max()):
        longest = start + int(spans[start:end].argmax())
        if len(found) < count and all(abs(longest - other) > width / 16 for other in found):
            found[longest] = _decode(raw[start:end])
    return found


@dataclass(frozen=True)
class Keepsake:
    """A piece of text and how long a layer keeps it."""

    text: str
    span: float
    before: str = ""
    after: str = ""
    count: int = 1


@dataclass(frozen=True)
class LayerKeeps:
    layer: int
    longest_bytes: list[Keepsake]
    shortest_bytes: list[Keepsake]
    longest_words: list[Keepsake]
    shortest_words: list[Keepsake]


def find_keepsakes(sample: Sample, *, count: int = 8) -> list[LayerKeeps]:
    """Per layer, the bytes (mean over their occurrences) and words (their longest byte) kept longest and shortest."""
    if sample.vocabulary != "bytes":
        return []
    out = []
    for layer, spans in enumerate(sample.spans):
        kinds = _by_byte(sample, spans)
        words = _by_word(sample, spans)
        out.append(LayerKeeps(layer, kinds[:count], kinds[: -count - 1 : -1], words[:count], words[: -count - 1 : -1]))
    return out


def _by_byte(sample: Sample, spans: np.ndarray) -> list[Keepsake]:
    """Byte kinds seen at least thrice (once in short samples), longest first."""
    least = 3 if len(spans) >= 1000 else 1
    kinds = {
        label: spans[[n for n, other in enumerate(sample.labels) if other == label]] for label in set(sample.labels)
    }
    found = [Keepsake(label, float(x.mean()), count=len(x)) for label, x in kinds.items() if len(x) >= least]
    return sorted(found, key=lambda k: (-k.span, k.text))


def _by_word(sample: Sample, spans: np.ndarray, around: int = 24) -> list[Keepsake]:
    """Distinct words at the place where they are kept longest, longest first."""
    raw = sample.tokens.astype(np.uint8).tobytes()
    best: dict[bytes, Keepsake] = {}
    for match in re.finditer(rb"[^\s]{2,24}", raw):
        start, end = match.span()
        span = float(spans[start:end].max())
        if span > (best[match[0]].span if match[0] in best else -math.inf):
            before, after = raw[max(0, start - around) : start], raw[end : end + around]
            best[match[0]] = Keepsake(_decode(match[0]), span, _decode(before), _decode(after))
    return sorted(best.values(), key=lambda k: (-k.span, k.text))


def _decode(raw: bytes) -> str:
    return show_line(raw.decode("utf-8", errors="replace"))
