"""Next-word prediction: a vocabulary of the commonest words, everything else "unknown"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from expire_span.settings.tasks import WordsTask

from .contract import Codec, Score, Split
from .tales import tell_tales
from .text import EvalRows, TrainRows

UNKNOWN = "<unknown>"
LEAST_WORDS = 1000
"""A text with fewer words is refused, since nothing could be learned from it."""


class WordList(Codec):
    """The commonest words of the training part; all others share the token 0. The text is read when they are asked for."""

    unit = "word"

    def __init__(self, config: WordsTask) -> None:
        self.config = config

    @cached_property
    def read(self) -> tuple[list[str], np.ndarray, dict[Split, tuple[int, int]]]:
        """The word of each token, the tokens of the whole text, and where its splits begin and end."""
        config, words = self.config, split_words(read_text(self.config))
        if len(words) < LEAST_WORDS:
            raise ValueError(
                f"{config.path} holds {len(words)} words, but words needs {LEAST_WORDS}; give a longer text"
            )
        valid, test = (int(len(words) * share) for share in (config.valid_share, config.test_share))
        train = len(words) - valid - test
        bounds: dict[Split, tuple[int, int]] = {"train": (0, train), "valid": (train, train + valid)}
        bounds["test"] = (train + valid, len(words))
        ranked = sorted(Counter(words[:train]).items(), key=lambda item: (-item[1], item[0]))
        names = [UNKNOWN, *(word for word, _ in ranked[: config.words])]
        return names, _to_tokens(words, names), bounds

    @property
    def names(self) -> list[str]:
        return self.read[0]

    @property
    def size(self) -> int:
        return max(len(self.names), 2)

    def label(self, token: int) -> str:
        return self.names[token] if token < len(self.names) else UNKNOWN

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        return _to_tokens(split_words(raw.decode("utf-8", errors="replace")), self.names)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return "".join(f"{self.label(token)} " for token in tokens).encode()


class Words:
    """Words and marks in lower case, cut into training, validation and test words from front to back."""

    score = Score("perplexity", higher_is_better=False)
    longest = 1024
    codec_of = WordList

    def __init__(self, config: WordsTask) -> None:
        self.config, self.codec = config, WordList(config)
        self.names, self.data, self.bounds = self.codec.read

    def split(self, split: Split) -> np.ndarray:
        start, end = self.bounds[split]
        return self.data[start:end]

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> TrainRows | EvalRows:
        """Rows read the words in order, so the seed is not used."""
        data, need = self.split(split), batch * block + 1 if split == "train" else 2
        if len(data) < need:
            where = self.config.path or "the tales"
            raise ValueError(
                f"{where}: {len(data)} words for {split}, but {batch} rows of {block} words need {need}; "
                "give a longer text, or a smaller batch or block"
            )
        return (TrainRows if split == "train" else EvalRows)(data, batch=batch, block=block)

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return float(np.exp(min(nll / max(count, 1), 50.0)))


def read_text(config: WordsTask) -> str:
    if not config.path:
        return tell_tales(config.tales)
    path = Path(config.path)
    if not path.is_file():
        raise ValueError(f"{config.path} is not a file; give a text file, or none for the built-in tales")
    return path.read_bytes().decode("utf-8", errors="replace")


def split_words(text: str) -> list[str]:
    """Words in lower case; every punctuation mark and every empty line is a word of its own."""
    return [word if word.strip() else "¶" for word in re.findall(r"\n\s*\n|\w+(?:['\u2019]\w+)*|[^\w\s]", text.lower())]


def _to_tokens(words: list[str], names: list[str]) -> np.ndarray:
    places = {word: n for n, word in enumerate(names)}
    return np.array([places.get(word, 0) for word in words], np.int64)
