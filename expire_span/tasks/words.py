"""Next-word prediction: a vocabulary of the commonest words, everything else "unknown"."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
from torch import Tensor

from expire_span.task_configs import WordsTask

from .contract import Score, Split, TaskSample, sample_stretch
from .tales import tell_tales
from .text import EvalRows, TrainRows

UNKNOWN = "<unknown>"
SAMPLE = 1024
"""Number of words in a sample."""
LEAST_WORDS = 1000
"""A text with fewer words is refused, since nothing could be learned from it."""


class Words:
    """Words and marks in lower case, cut into training, validation and test words from front to back."""

    score = Score("perplexity", higher_is_better=False)

    def __init__(self, config: WordsTask) -> None:
        self.config = config
        words = split_words(read_text(config))
        if len(words) < LEAST_WORDS:
            raise ValueError(
                f"{config.path} holds {len(words)} words, but words needs {LEAST_WORDS}; give a longer text"
            )
        valid, test = (int(len(words) * share) for share in (config.valid_share, config.test_share))
        train = len(words) - valid - test
        self.bounds = {"train": (0, train), "valid": (train, train + valid), "test": (train + valid, len(words))}
        ranked = sorted(Counter(words[:train]).items(), key=lambda item: (-item[1], item[0]))
        self.names = [UNKNOWN, *(word for word, _ in ranked[: config.words])]
        places = {word: n for n, word in enumerate(self.names)}
        self.data = np.array([places.get(word, 0) for word in words], np.int64)
        self.vocab = max(len(self.names), 2)

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

    def show(self, tokens: Tensor) -> list[str]:
        return [self.names[token] if token < len(self.names) else UNKNOWN for token in tokens.tolist()]

    def sample(self, *, seed: int) -> TaskSample:
        """The first words of the test split."""
        return sample_stretch(self, SAMPLE, seed=seed)


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
