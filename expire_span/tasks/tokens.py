"""Text as the tokens of a Hugging Face tokenizer file, with the number of bytes that each token stands for.

The number of bytes makes scores comparable: a tokenizer with longer tokens has fewer of them, and each is harder to predict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expire_span.errors import UserError

from .contract import Codec
from .signs import SIGNS

PIECE = 2**16
"""Bytes of text that are given to the tokenizer at once; pieces end after a newline where there is one."""
SIDE_BY_SIDE = 64
"""Pieces that the tokenizer works on in parallel."""
ADVICE = "give a tokenizer.json that Hugging Face's tokenizers wrote, or none to read bytes"


class Tokenizer(Codec):
    """A tokenizer file. Nothing in it can run code."""

    unit = "token"

    def __init__(self, path: str) -> None:
        self.path = path
        self._tokenizer = _load(path)
        self._size = max(self._tokenizer.get_vocab().values(), default=0) + 1
        if self._size < 2:
            raise UserError(f"the tokenizer {path} knows {self._size} token, but a text needs at least 2; {ADVICE}")

    @property
    def size(self) -> int:
        return self._size

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        return self.measure(raw, source)[0]

    def measure(self, raw: bytes, source: str = "the text") -> tuple[np.ndarray, np.ndarray]:
        """Tokens [n] of UTF-8 text, and the bytes [n] that each stands for, whose sum is the length of the text.

        Bytes that belong to no token, such as dropped spaces, are counted with the next token, or at the end with the last one.
        """
        ids, sizes, left = [np.zeros(0, np.int32)], [np.zeros(0, np.int32)], 0
        for pieces in _batches(_cut(raw), SIDE_BY_SIDE):
            texts = [_decode(raw[start:end], start, source) for start, end in pieces]
            for text, found in zip(texts, self._tokenizer.encode_batch(texts, add_special_tokens=False)):
                counts, left = _bytes_of(text, [end for _, end in found.offsets], left)
                ids.append(np.array(found.ids, np.int32))
                sizes.append(counts)
        tokens, of_each = np.concatenate(ids), np.concatenate(sizes)
        if len(of_each):
            of_each[-1] += left
        return tokens, of_each

    def decode(self, tokens: Sequence[int]) -> bytes:
        return self._text_of(list(tokens)).encode()

    def _text_of(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def gives_back(self, raw: bytes) -> bool:
        """Whether encoding and decoding the first piece of a text gives it back, apart from spaces at its ends."""
        start, end = next(_cut(raw), (0, 0))
        text = raw[start:end].decode("utf-8", errors="replace")
        return self._text_of(self._tokenizer.encode(text, add_special_tokens=False).ids).strip() == text.strip()

    def label(self, token: int) -> str:
        """One token as visible characters."""
        text = self._text_of([token])
        text = text.translate(str.maketrans(SIGNS))
        if text and text.isprintable() and "\ufffd" not in text:
            return text
        return self._tokenizer.id_to_token(token) or f"<{token}>"  # a part of a character, or nothing that can be shown

    def writer(self, prompt: Sequence[int]) -> Callable[[int], bytes]:
        """A character whose bytes are spread over tokens appears with the last of them."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(prompt), skip_special_tokens=False)
        return lambda token: (stream.step(self._tokenizer, token) or "").encode()


def _load(path: str) -> Any:
    place = Path(path)
    if not place.is_file():
        raise UserError(f"the tokenizer {path} is not a file; {ADVICE}")
    from tokenizers import Tokenizer as Loaded

    try:
        loaded = Loaded.from_file(str(place))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with a file
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"the tokenizer {path} cannot be read ({cause}); {ADVICE}") from error
    loaded.no_truncation()  # a model's tokenizer file may have been saved with the length limit of its training
    loaded.no_padding()
    return loaded


def _cut(raw: bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each piece; no character is cut in two."""
    start = 0
    while start < len(raw):
        end = min(start + PIECE, len(raw))
        if end < len(raw):
            line = raw.rfind(b"\n", start, end)
            end = line + 1 if line >= start else next_character(raw, end)
        yield start, end
        start = end


def next_character(raw: Any, place: int) -> int:
    """The first place from `place` on where a character of UTF-8 begins, or the end."""
    while place < len(raw) and (int(raw[place]) & 0xC0) == 0x80:
        place += 1
    return place


def _decode(piece: bytes, start: int, source: str) -> str:
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source} is not UTF-8 text (byte {start + error.start} is {piece[error.start]:#04x}), "
            "which a tokenizer needs; leave --task.tokenizer out to read bytes"
        ) from error


def _bytes_of(text: str, ends: list[int], left: int) -> tuple[np.ndarray, int]:
    """Number of bytes of each token of a piece, given the characters at which tokens end, and the number of bytes left over.

    left: bytes left over from the piece before. Tokens that share a character, each with a part of its bytes, all end with it;
    its bytes are counted with the first of them.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
    places = np.concatenate([[0], np.cumsum(widths)])  # byte at which each character begins
    if not ends:
        return np.zeros(0, np.int32), left + int(places[-1])
    reached = np.maximum.accumulate(places[ends])
    counts = np.diff(reached, prepend=0)
    counts[0] += left
    return counts.astype(np.int32), int(places[-1] - reached[-1])


def _batches(items: Iterator[Any], count: int) -> Iterator[list[Any]]:
    batch = []
    for item in items:
        batch.append(item)
        if len(batch) == count:
            yield batch
            batch = []
    if batch:
        yield batch
