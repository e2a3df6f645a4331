"""Filling text between the facts of a prompt: sentences of books, or a few sentences about nothing, again and again."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from expire_span.errors import UserError

NOTHING = (
    "The field is wide.",
    "The wind is light.",
    "The road is long.",
    "On we go.",
    "Up the hill and down again.",
)
"""The repeated sentences where no books are given, and of those tasks that are defined with them."""
MOST_CHARACTERS = 4_000_000
"""Number of characters that are read of all books together; each book gives an equal part."""


class Haystack:
    """Sentences in the order in which they were written."""

    def __init__(self, sentences: tuple[str, ...], name: str) -> None:
        self.sentences, self.name = sentences, name

    def take(self, rng: random.Random, count: int) -> list[str]:
        """Consecutive sentences from a random place; after the last one the first follows."""
        start = rng.randrange(len(self.sentences)) if self.sentences != NOTHING else 0
        return list(islice(cycle(self.sentences), start, start + count))


def no_books() -> Haystack:
    return Haystack(NOTHING, "repeated sentences")


def read_books(path: Path) -> Haystack:
    """The sentences of a text file, or of the .txt files of a folder."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"no text at {path}: give a text file, or a folder of .txt files")
    sentences: list[str] = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        middle = text[len(text) // 10 :][
            : MOST_CHARACTERS // len(files)
        ]  # title pages and lists of chapters come first
        sentences += split_sentences(middle)
    if len(sentences) < len(NOTHING):
        raise UserError(
            f"{path} has {len(sentences)} whole sentences, at least {len(NOTHING)} are needed; give more text"
        )
    return Haystack(tuple(sentences), str(path))


def split_sentences(text: str) -> list[str]:
    """Sentences of between 20 and 400 characters, on one line each."""
    found = re.split(r"(?<=[.!?])[\"'\u201d\u2019]?\s+", " ".join(text.split()))
    return [x for x in found if 20 <= len(x) <= 400]


def fit(tokenizer: Any, build: Callable[[int], str], room: int) -> tuple[int, int]:
    """The largest number n of parts with which the text build(n) has at most `room` tokens, and its tokens; a text must grow
    with n."""
    sizes: dict[int, int] = {}

    def size(n: int) -> int:
        if n not in sizes:
            sizes[n] = len(tokenizer.encode(build(n), add_special_tokens=False))
        return sizes[n]

    low, high = 1, 2
    if size(low) > room:
        raise UserError(
            f"a context with room for {room} tokens cannot hold its facts, which need {size(low)}; give a longer --context"
        )
    while size(high) <= room:
        low, high = high, max(high + 1, min(int(1.02 * high * room / max(size(high), 1)), 64 * high))
    while high - low > 1:
        share = (room - size(low)) / (size(high) - size(low))
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        low, high = (guess, high) if size(guess) <= room else (low, guess)
    return low, size(low)


def read_passages(tokenizer: Any, path: Path, tokens: int, count: int) -> list[list[int]]:
    """Passages of exactly `tokens` tokens from at most `count` different files, spread over the folder."""
    from expire_span.hf.texts import encode_text

    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    found = []
    for file in files[:: max(1, len(files) // count)][:count]:
        text = file.read_text(encoding="utf-8", errors="replace")
        ids = encode_text(tokenizer, text[len(text) // 10 :][: 12 * tokens])[:tokens]
        if len(ids) == tokens:
            found.append(ids)
    return found
