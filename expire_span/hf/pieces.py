"""How the tokens of a retrofitted model are written: by the tokenizer of its base model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from expire_span.tasks.contract import Codec

from .layouts import text_config
from .texts import encode_text


class Pieces(Codec):
    """Pieces of words. A text is read behind the beginning that the adapter records, or else behind the tokenizer's own."""

    unit = "piece"

    def __init__(self, retrofitted: Any, tokenizer: Any) -> None:
        self.retrofitted, self.tokenizer = retrofitted, tokenizer

    @property
    def size(self) -> int:
        return text_config(self.retrofitted.model).vocab_size

    def label(self, token: int) -> str:
        """The text that a token adds to a text. Decoded alone, it would lose the space before a word in some tokenizers."""
        once, twice = (self.tokenizer.decode([token] * times) for times in (1, 2))
        return twice[len(once) :] if twice.startswith(once) else once

    def label_first(self, token: int) -> str:
        """Without a space before the first word, so that the labels of all tokens together are the text."""
        return self.tokenizer.decode([token])

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        known, text = self.retrofitted.beginning, raw.decode("utf-8", errors="replace")
        tokens = encode_text(self.tokenizer, text, None if known is None else known.text) if text else []
        return np.array(tokens, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self.tokenizer.decode(list(tokens)).encode()
