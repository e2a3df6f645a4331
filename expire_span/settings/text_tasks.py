"""Settings of tasks that predict a text: bytes or tokens, words, books. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from expire_span.checks import Bound, Count, checked
from expire_span.field_docs import documented

HeldOut = Annotated[float, Bound("lie between 0 and 0.5", lambda x: 0 < x < 0.5)]
"""A share of the data that is not trained on."""


@documented
@dataclass(frozen=True)
@checked
class TextTask:
    """Predict the next byte of a text, or the next token of a tokenizer."""

    kind: Literal["text"] = "text"
    path: str = ""
    """File of text, or folder whose files are read in name order; bytes are read as they are."""
    tokenizer: str = ""
    """File of a Hugging Face tokenizer (tokenizer.json) that turns UTF-8 text into tokens; none reads bytes."""
    valid_share: HeldOut = 0.05
    """Share of the bytes, after the training bytes, that is kept for validation."""
    test_share: HeldOut = 0.05
    """Share of the bytes, at the very end, that is kept for the test."""
    shuffle: bool = False
    """In each pass, cut the training text into blocks at another place and read them in random order, each without memory of
    what came before it."""


@documented
@dataclass(frozen=True)
@checked
class WordsTask:
    """Predict the next word of a text file, or of built-in little tales."""

    kind: Literal["words"] = "words"
    path: str = ""
    """File of text; empty takes built-in tales, in which things said early matter late."""
    words: Count = 5000
    """Number of the commonest words and marks of the training part that have a token; all others are "unknown"."""
    tales: Count = 2000
    """How many tales are told, where no file is given."""
    valid_share: HeldOut = 0.05
    """Share of the words, after the training words, that is kept for validation."""
    test_share: HeldOut = 0.05
    """Share of the words, at the very end, that is kept for the test."""


@documented
@dataclass(frozen=True)
@checked
class BooksTask:
    """Predict the next character of whole books; memory is emptied where a book begins."""

    kind: Literal["books"] = "books"
    path: str = "data/books"
    """Folder of .txt books, or with train, validation and test folders of them (the layout of PG-19)."""
    characters: Annotated[int, Bound("lie in 1..65000", lambda x: 1 <= x <= 65_000)] = 255
    """Number of the commonest characters of the training books that have a token; all others share one token."""
