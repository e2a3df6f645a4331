"""Next-character prediction over whole books; memory is emptied where a book begins.

A folder holds either `train`, `validation` and `test` with one .txt file per book (the layout in which PG-19 was released), or
.txt files, which are split by book in sorted order: of every 16 books the first is for validation, the second for the test.
Characters that are rare in the training books share one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.settings.tasks import BooksTask

from .contract import SPLITS, Batch, Codec, Score, Split, bits
from .episodes import key_of
from .hashing import draws_of
from .signs import SIGNS
from .text import check_rows

RARE = 0
"""Token of all characters outside the vocabulary."""
EVERY = 16
"""Of every 16 books, one is for validation and one for the test."""
FOLDERS: dict[Split, str] = {"train": "train", "valid": "validation", "test": "test"}


class Letters(Codec):
    """The commonest characters of the training books, which are counted when the vocabulary is first asked for."""

    unit = "character"

    def __init__(self, config: BooksTask) -> None:
        self.config = config

    @cached_property
    def alphabet(self) -> np.ndarray:
        """The code points that have a token, in order; the first has the token 1."""
        counts = np.zeros(0x110000, np.int64)
        for path in find_books(self.config.path)["train"]:
            counts += np.bincount(read_codes(path), minlength=len(counts))
        common = np.argsort(-counts, kind="stable")[: self.config.characters]
        return np.sort(common[counts[common] > 0])

    @cached_property
    def _token_of(self) -> np.ndarray:
        token_of = np.zeros(0x110000, np.uint16)
        token_of[self.alphabet] = np.arange(1, len(self.alphabet) + 1)
        return token_of

    @property
    def size(self) -> int:
        return max(len(self.alphabet) + 1, 2)

    def label(self, token: int) -> str:
        letter = self._letter(token)
        return SIGNS.get(letter, letter if letter.isprintable() else f"U+{ord(letter):04X}") if letter else "rare"

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        return self.to_tokens(codes_of(raw, source))

    def to_tokens(self, codes: np.ndarray) -> np.ndarray:
        return self._token_of[codes]

    def decode(self, tokens: Sequence[int]) -> bytes:
        return "".join(self._letter(token) or "\ufffd" for token in tokens).encode()

    def _letter(self, token: int) -> str:
        """The character of a token; empty for that of the rare ones."""
        return "" if token == RARE or token > len(self.alphabet) else chr(int(self.alphabet[token - 1]))


class Books:
    """Characters of books; the vocabulary is that of the training books."""

    score = Score("bpc", higher_is_better=False)
    longest = 8192
    codec_of = Letters

    def __init__(self, config: BooksTask) -> None:
        self.config, self.codec = config, Letters(config)
        self.files = find_books(config.path)
        self.read: dict[Split, list[np.ndarray]] = {}

    def split(self, split: Split) -> list[np.ndarray]:
        """The books of one split as tokens; read when they are first asked for."""
        if split not in self.read:
            self.read[split] = [self.codec.to_tokens(read_codes(path)) for path in self.files[split]]
        return self.read[split]

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> BookRows:
        return BookRows(self.split(split), batch=batch, block=block, endless=split == "train", key=key_of(split, seed))

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return bits(nll, count)


def find_books(path: str) -> dict[Split, list[Path]]:
    """The books of each split, in sorted order."""
    place, advice = Path(path), "give a folder of .txt files with --task.path, or get one with: expire-span data books"
    if not path or not place.is_dir():
        raise ValueError(f"{path or 'an empty path'} is not a folder of books; {advice}")
    found: dict[Split, list[Path]]
    parts = {folder: (place / folder).is_dir() for folder in FOLDERS.values()}
    if all(parts.values()):
        found = {split: _texts((place / FOLDERS[split]).glob("*.txt")) for split in SPLITS}
    elif any(parts.values()):  # splitting the training books anew would be a silent change of the task
        have, lack = (", ".join(name for name in parts if parts[name] == wanted) for wanted in (True, False))
        advice = "a download that was interrupted goes on with: expire-span data books"
        raise ValueError(f"{path} has the folder {have} but not {lack}; give it all three or none of them; {advice}")
    else:
        books = _texts(place.rglob("*.txt"))
        found = {"valid": books[0::EVERY], "test": books[1::EVERY]}
        held = {*found["valid"], *found["test"]}
        found["train"] = [book for book in books if book not in held]
    for split in SPLITS:
        if not found[split]:
            have = {name: len(books) for name, books in found.items()}
            raise ValueError(f"{path} has no book for {split} ({have}), each split needs at least 1; {advice}")
    return found


def _texts(paths: Iterable[Path]) -> list[Path]:
    return sorted(path for path in paths if not path.is_dir())


def read_codes(path: Path) -> np.ndarray:
    """Code points of a book, a UTF-8 file; line ends are those of the file."""
    codes = codes_of(path.read_bytes(), str(path))
    if len(codes) < 2:
        raise ValueError(f"{path} holds {len(codes)} characters, but a book needs at least 2; remove it")
    return codes


def codes_of(raw: bytes, source: str) -> np.ndarray:
    """Code points of UTF-8 text."""
    try:
        return np.frombuffer(raw.decode("utf-8").encode("utf-32-le"), np.uint32)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{source} is not UTF-8 text: byte {raw[error.start]:#04x} at {error.start} of {len(raw)}; convert or remove it"
        ) from error


class BookRows:
    """Every row reads a book from front to back, then the next one that no row has taken.

    A block never crosses a book's end: the rest of it is padding that is not scored, and the row is fresh in the next block. In
    training the books come in a new order in each epoch. Where there are fewer books than rows, rows start at different places
    of their first book, so that they do not all read the same text.
    """

    def __init__(self, books: list[np.ndarray], *, batch: int, block: int, endless: bool, key: np.ndarray) -> None:
        self.books, self.block, self.endless, self.key = books, block, endless, key
        self.turn = batch  # number of books taken so far, over all epochs
        self.taken = list(range(batch))  # turn (number in the order of taking) of the book that each row reads
        few = endless and len(books) < batch
        self.offset = [row * len(self._book(row)) // batch if few else 0 for row in range(batch)]
        self.fresh = [True] * batch

    def _book(self, turn: int) -> np.ndarray:
        """The book of a turn; after the last one an empty book."""
        lap, place = divmod(turn, len(self.books))
        if not self.endless:
            longest_first = sorted(range(len(self.books)), key=lambda n: -len(self.books[n]))
            return self.books[longest_first[place]] if lap == 0 else np.zeros(0, np.uint16)
        draws = draws_of(self.key, lap, np.arange(len(self.books)))
        return self.books[int(np.argsort(draws)[place])]

    def __iter__(self) -> BookRows:
        return self

    def __next__(self) -> Batch:
        books = [self._book(turn) for turn in self.taken]
        if not any(len(book) for book in books):
            raise StopIteration
        shape = (len(books), self.block)
        x, y, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        fresh = np.array(self.fresh)
        for row, book in enumerate(books):
            start = self.offset[row]
            count = max(min(self.block, len(book) - 1 - start), 0)
            x[row, :count], y[row, :count] = book[start : start + count], book[start + 1 : start + count + 1]
            mask[row, :count] = True
            self._advance(row, start + count, over=start + count >= len(book) - 1)
        return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.from_numpy(fresh))

    def _advance(self, row: int, offset: int, *, over: bool) -> None:
        self.offset[row], self.fresh[row] = (0, True) if over else (offset, False)
        if over:
            self.taken[row], self.turn = self.turn, self.turn + 1

    def state_dict(self) -> dict[str, Any]:
        return {"turn": self.turn, "taken": list(self.taken), "offset": list(self.offset), "fresh": list(self.fresh)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_rows(len(state["taken"]), len(self.taken))
        self.turn, self.taken = state["turn"], list(state["taken"])
        self.offset, self.fresh = list(state["offset"]), list(state["fresh"])
