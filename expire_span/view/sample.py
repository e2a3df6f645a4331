"""One sample read by a trained decoder: the tokens, and the span that each layer gave to each."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch

from expire_span.config import RecallTask, RunConfig, TextTask
from expire_span.models.decoder import Decoder
from expire_span.tasks.task import Task

TEXT_SAMPLE = 8192
"""Bytes of text read for the report."""
EPISODES = 16
"""Episodes of recall of which the longest with a cue is shown."""


@dataclass(frozen=True)
class Sample:
    tokens: np.ndarray
    """[T]."""
    labels: list[str]
    spans: np.ndarray
    """[layers, T], in steps; with a span per head, the longest."""
    ramp: int

    def lifetimes(self, layer: int) -> np.ndarray:
        """Steps for which each memory can be read, its own included: a memory lives while age < span + ramp."""
        return np.ceil(self.spans[layer] + self.ramp).astype(np.int64)

    @property
    def longest_layer(self) -> int:
        """The layer that holds a single memory longest."""
        return int(self.spans.max(1).argmax())

    @property
    def kinds(self) -> list[str]:
        """What each token is: the first word of its label, where labels have several words."""
        several = any(" " in label for label in self.labels)
        return [label.split()[0] for label in self.labels] if several else ["memory"] * len(self.labels)


@torch.no_grad()
def read_sample(decoder: Decoder, task: Task, config: RunConfig) -> Sample:
    """The longest of a few episodes, or a stretch of text, through the decoder with memory carried."""
    tokens = _episode(task, config) if isinstance(config.task, RecallTask) else _stretch(task, config)
    state, parts = None, []
    for block in tokens.split(max(config.train.block, 64)):
        _, state, aux = decoder(block[None], state)
        parts.append(torch.stack([_widest(layer.span, config) for layer in aux.layers]))
    spans = torch.cat(parts, 1).float().numpy()
    return Sample(tokens.numpy(), task.show(tokens), spans, getattr(config.model.mixer, "ramp", 1))


def _widest(span: torch.Tensor | None, config: RunConfig) -> torch.Tensor:
    """[1, T] or [1, Hkv, T] -> [T]."""
    if span is None:
        raise ValueError(f"the memory system {config.model.mixer.kind} gives tokens no spans")
    return span[0] if span.dim() == 2 else span[0].amax(0)


def _episode(task: Task, config: RunConfig) -> torch.Tensor:
    stream = task.stream("test", batch=1, block=config.task.max_length + 2, seed=config.seed)  # type: ignore[union-attr]
    episodes = [batch.x[0] for batch, _ in zip(stream, range(EPISODES))]
    with_cue = [episode for episode in episodes if task.show(episode[:1])[0].startswith("cue")]
    return max(with_cue or episodes, key=len)


def _stretch(task: Task, config: RunConfig) -> torch.Tensor:
    return next(iter(task.stream("test", batch=1, block=TEXT_SAMPLE, seed=config.seed))).x[0]


def marks_of(sample: Sample, config: RunConfig) -> dict[int, str]:
    """Places of a sample that a reader should find at once."""
    if not isinstance(config.task, RecallTask):
        return {}
    return {n: label for n, label in enumerate(sample.labels) if label.startswith(("cue", "which"))}


# What lives longest


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


def find_keepsakes(sample: Sample, config: RunConfig, *, count: int = 8) -> list[LayerKeeps]:
    """Per layer, the bytes (mean over their occurrences) and words (their longest byte) kept longest and shortest."""
    if not isinstance(config.task, TextTask):
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
    return raw.decode("utf-8", errors="replace").replace("\n", "⏎")
