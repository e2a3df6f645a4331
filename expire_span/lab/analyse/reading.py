"""Reads a text with a run's model, memory carried: the span of every token in every layer, and the bits to predict it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from expire_span.checkpoint import load_model
from expire_span.models.decoder import Decoder
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import RunConfig
from expire_span.shipped import SAMPLE
from expire_span.tasks.registry import build_task, text_codec
from expire_span.tasks.signs import SIGNS
from expire_span.view.limit import limit_spans

UNITS = ("byte", "character")
"""What tokens must be, so that each is a letter."""
LETTERS = {sign: letter for letter, sign in SIGNS.items()}
"""The letters that signs stand for."""
BLOCK = 1024
"""Number of tokens that are read in one call; it does not change the result."""
UNKNOWN = "\ufffd"
"""Stands for a token that is not a letter by itself, such as one byte of a multi-byte character."""


@dataclass(frozen=True)
class TextReading:
    """What the model did with each token of a text."""

    text: str
    """One letter for each token."""
    spans: dict[int, np.ndarray]
    """Spans [T] by layer, counted from 1; with a span per head, the longest. Layers without spans are left out."""
    bits: np.ndarray
    """Bits to predict each token from those before it, [T]; 0 for the first."""


@dataclass(frozen=True)
class TextModel:
    """A run's model, a text as tokens, and the letter of each token of the vocabulary."""

    decoder: Decoder
    letters: list[str]
    """The letter of each token."""
    tokens: Tensor
    """The beginning of the test split, [T]."""
    block: int = BLOCK
    """Tokens that are read at once."""

    @classmethod
    def open(
        cls, run: RunFolder, count: int, device: torch.device | str = "cpu", raw: bytes | None = None
    ) -> TextModel:
        """The model of the newest checkpoint, and at most `count` letters of `raw` or, if that is None, of the test split; of a
        model without its data, of the sample in its folder."""
        codec, task = text_codec(run.config.task, "analyse"), run.config.task
        if codec.unit not in UNITS:
            raise UserError(f"analyse reads runs whose tokens are {' or '.join(UNITS)}s, got {codec.unit}s")
        decoder, config = load_model(run, device)
        if raw is None and (run.path / SAMPLE).is_file() and not os.path.exists(getattr(task, "path", "")):
            raw = (run.path / SAMPLE).read_bytes()
        if raw is not None and len(raw) < 2:
            raise UserError(f"the text to analyse has {len(raw)} bytes, and needs at least 2")
        tokens = (
            _test_split(config, count) if raw is None else torch.tensor(codec.encode(raw)[:count], dtype=torch.long)
        )
        return cls(decoder, [_letter(codec.label(token)) for token in range(codec.size)], tokens)

    @property
    def text(self) -> str:
        return "".join(self.letters[token] for token in self.tokens.tolist())

    def encode(self, text: str) -> Tensor:
        """Tokens of letters; one that the model does not know is refused."""
        places = {letter: n for n, letter in enumerate(self.letters) if letter != UNKNOWN}
        missing = sorted({letter for letter in text if letter not in places})
        if missing:
            raise UserError(f"the model has no token for {missing[0]!r}; give a word of letters that its text has")
        return torch.tensor([places[letter] for letter in text], dtype=torch.long)

    @torch.no_grad()
    def read(self, tokens: Tensor, limit: float | None = None) -> TextReading:
        """Read tokens [T] from an empty memory. limit: clamp every span to this many steps; None does not."""
        device = next(self.decoder.parameters()).device
        spans: dict[int, list[Tensor]] = {}
        costs, state, last = [], None, None
        with limit_spans(self.decoder, limit):
            for part in tokens.to(device).split(self.block):
                logits, state, aux = self.decoder(part.unsqueeze(0), state, keep="kv")
                costs.append(torch.zeros(1) if last is None else _bits(last, part[:1]))
                costs.append(_bits(logits[0, :-1], part[1:]))
                last = logits[0, -1:]
                for n, layer in enumerate(aux.layers, 1):
                    if layer.span is not None:
                        spans.setdefault(n, []).append(_longest(layer.span))
        text = "".join(self.letters[token] for token in tokens.tolist())
        found = {n: torch.cat(parts).cpu().double().numpy() for n, parts in spans.items()}
        return TextReading(text, found, torch.cat(costs).double().numpy())


def _test_split(config: RunConfig, count: int) -> Tensor:
    """At most `count` tokens of the test split; of books, of the first one."""
    tokens, stream = [], iter(build_task(config.task).stream("test", batch=1, block=BLOCK, seed=config.seed))
    while sum(map(len, tokens)) < count and (batch := next(stream, None)) is not None:
        if tokens and bool(batch.fresh.any()):
            break  # another book begins
        tokens.append(batch.x[0, batch.mask[0]])
    return torch.cat(tokens)[:count]


def _letter(shown: str) -> str:
    return LETTERS.get(shown, shown if len(shown) == 1 else UNKNOWN)


def _bits(logits: Tensor, wanted: Tensor) -> Tensor:
    return (F.cross_entropy(logits.float(), wanted, reduction="none") / np.log(2)).cpu()


def _longest(span: Tensor) -> Tensor:
    """[1, T] or [1, Hkv, T] -> [T]."""
    return span[0].float() if span.dim() == 2 else span[0].float().amax(0)
