"""Prediction of the next byte, or of the next token of a tokenizer, over the text of a file or a folder."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expire_span.settings.tasks import TextTask

from .contract import Batch, Codec, Score, Split, bits
from .signs import SIGNS
from .tokens import PIECE, Tokenizer, next_character
from .unpacking import find_packing


class Bytes(Codec):
    """Raw bytes, which stand for themselves."""

    unit = "byte"

    @property
    def size(self) -> int:
        return 256

    def label(self, token: int) -> str:
        """A byte that is not a printable character is written in hexadecimal."""
        return SIGNS.get(chr(token)) or (chr(token) if 32 < token < 127 else f"\\x{token:02x}")

    def encode(self, raw: bytes, source: str = "the text") -> np.ndarray:
        return np.frombuffer(raw, np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        return bytes(tokens)


BYTES = Bytes()


class Text:
    """A text whose bytes are split into training, validation and test from front to back.

    With a tokenizer, each split is tokenized on its own when it is first needed, so that all tokenizers are scored on the same
    bytes.
    """

    score = Score("bpb", higher_is_better=False)
    longest = 8192

    def __init__(self, config: TextTask) -> None:
        self.config = config
        self.codec = self.codec_of(config)
        self.data = read_bytes(config.path)
        valid, test = (int(len(self.data) * share) for share in (config.valid_share, config.test_share))
        train = len(self.data) - valid - test
        cuts = [0, train, train + valid, len(self.data)]
        if self.codec.unit == "token":
            cuts = [next_character(self.data, cut) for cut in cuts]
        self.bounds = {"train": (cuts[0], cuts[1]), "valid": (cuts[1], cuts[2]), "test": (cuts[2], cuts[3])}
        self._tokens: dict[Split, tuple[np.ndarray, np.ndarray]] = {}

    @staticmethod
    def codec_of(config: TextTask) -> Bytes | Tokenizer:
        return Tokenizer(config.tokenizer) if config.tokenizer else BYTES

    def split(self, split: Split) -> np.ndarray:
        """The bytes of one split."""
        start, end = self.bounds[split]
        return self.data[start:end]

    def tokens(self, split: Split) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens of one split, and the bytes that each stands for; None where tokens are bytes."""
        if isinstance(self.codec, Bytes):
            return self.split(split), None
        if split not in self._tokens:
            self._tokens[split] = self.codec.measure(self.split(split).tobytes(), self.config.path)
        return self._tokens[split]

    def stream(self, split: Split, *, batch: int, block: int, seed: int) -> TrainRows | ShuffledRows | EvalRows:
        """Rows read the text in order, and use the seed only where blocks are shuffled."""
        data, sizes = self.tokens(split)
        self._check_length(split, len(data), batch, block)
        if split == "train" and self.config.shuffle:
            return ShuffledRows(data, sizes, batch=batch, block=block, seed=seed)
        return (TrainRows if split == "train" else EvalRows)(data, sizes, batch=batch, block=block)

    def _check_length(self, split: Split, have: int, batch: int, block: int) -> None:
        need = batch * block + 1 if split == "train" else 2
        if have < need:
            unit = f"{self.codec.unit}s"
            what = f"a batch of {batch} rows of {block} {unit}" if split == "train" else "one prediction"
            share = {"valid": self.config.valid_share, "test": self.config.test_share}
            own = share.get(split, 1 - sum(share.values()))
            left = f"{have}" if unit == "bytes" else f"{have} tokens"
            width = len(self.split(split)) / max(have, 1)
            raise ValueError(
                f"{self.config.path} is too short: its {len(self.data)} bytes leave {left} for {split}, "
                f"but {what} needs {need}; "
                f"give about {math.ceil((need + 1) * max(width, 1) / own)} bytes or more, or a smaller batch or block"
            )

    def score_of(self, nll: float, correct: float, count: float) -> float:
        return bits(nll, count)

    def text_scores(self, split: Split, nll: float, tokens: int, size: int) -> dict[str, float | int | bool]:
        """For text read by a tokenizer, the score per token and per byte; `size` is the number of bytes of the tokens."""
        if isinstance(self.codec, Bytes):
            return {}
        whole = self.codec.gives_back(self.split(split)[: 2 * PIECE].tobytes())
        scores = {"bits_per_token": bits(nll, tokens), "bits_per_byte": bits(nll, size)}
        return scores | {"tokens_scored": tokens, "bytes_scored": size, "tokenizer_gives_text_back": whole}


def read_bytes(path: str) -> np.ndarray:
    """The bytes of a file (memory-mapped), or of all files below a folder in sorted order, joined."""
    if not path:
        raise ValueError("text needs a file or a folder, got an empty path; give one with --task.path")
    place = Path(path)
    if place.is_dir():
        files = sorted(p for p in place.rglob("*") if p.is_file())
        check_unpacked(*files)
        data = np.concatenate([np.zeros(0, np.uint8), *(np.fromfile(p, np.uint8) for p in files)])
    elif place.is_file():
        check_unpacked(place)
        size = place.stat().st_size
        data = np.memmap(place, np.uint8, mode="r") if size else np.zeros(0, np.uint8)
    else:
        how = _how_to_get(place)
        raise ValueError(f"{path} is neither a file nor a folder; give an existing one with --task.path{how}")
    if not len(data):
        raise ValueError(f"{path} holds 0 bytes, but text needs at least 2; give a file or folder with text")
    return data


def _how_to_get(place: Path) -> str:
    """The commands that make a recipe's data, as the end of a sentence; empty for a user's own file."""
    if place.name == "enwik8":
        return ", or get it with: expire-span data enwik8"
    if place.name == "shipped":  # Wikipedia and books, joined
        wikipedia, books = f"data enwik8 --to {place}/enwik8", f"data books --from FOLDER --to {place}/books"
        return f", or get it with: expire-span {wikipedia}, and expire-span {books}"
    return ""


def check_unpacked(*files: Path) -> None:
    """Refuse compressed files: their bytes look random, and no model could learn anything from them."""
    for path in files:
        kind = find_packing(path)
        if kind is not None:
            raise ValueError(f"{path} is compressed ({kind}), and text is read as it is; unpack it first")


class TrainRows:
    """Endless: row r starts at r * n // batch, advances block by block, and returns to the start of the data after its end."""

    def __init__(self, data: np.ndarray, sizes: np.ndarray | None = None, *, batch: int, block: int) -> None:
        self.data, self.sizes, self.block = data, sizes, block
        self.starts = [row * len(data) // batch for row in range(batch)]
        self.fresh = [True] * batch

    def __iter__(self) -> TrainRows:
        return self

    def __next__(self) -> Batch:
        ends = [min(start + self.block, len(self.data) - 1) for start in self.starts]
        out = cut_rows(self.data, self.starts, ends, self.block, self.fresh, self.sizes)
        self.fresh = [end >= len(self.data) - 1 for end in ends]
        self.starts = [0 if wraps else end for end, wraps in zip(ends, self.fresh)]
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"starts": list(self.starts), "fresh": list(self.fresh)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_rows(len(state["starts"]), len(self.starts))
        self.starts, self.fresh = list(state["starts"]), list(state["fresh"])


class ShuffledRows:
    """Endless: each pass cuts the data into blocks from a random place in the first one on, and reads them in random order."""

    def __init__(self, data: np.ndarray, sizes: np.ndarray | None = None, *, batch: int, block: int, seed: int) -> None:
        self.data, self.sizes, self.block, self.rows, self.seed = data, sizes, block, batch, seed
        self.load_state_dict({"number": 0, "read": 0})

    def _begin(self, number: int) -> None:
        """Draw the pass with this number, from 0."""
        draw = np.random.default_rng([self.seed, number])
        first = int(draw.integers(min(self.block, len(self.data) - self.block)))
        self.number, self.read = number, 0
        self.starts = draw.permutation(np.arange(first, len(self.data) - self.block, self.block)).tolist()

    def __iter__(self) -> ShuffledRows:
        return self

    def __next__(self) -> Batch:
        starts: list[int] = []
        while len(starts) < self.rows:
            if self.read == len(self.starts):
                self._begin(self.number + 1)
            taken = self.starts[self.read : self.read + self.rows - len(starts)]
            self.read += len(taken)
            starts += taken
        ends = [start + self.block for start in starts]
        return cut_rows(self.data, starts, ends, self.block, [True] * self.rows, self.sizes)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin(state["number"])
        self.read = state["read"]


class EvalRows:
    """Finite: the data in `batch` contiguous rows; every token after the first is predicted once."""

    def __init__(self, data: np.ndarray, sizes: np.ndarray | None = None, *, batch: int, block: int) -> None:
        self.data, self.sizes, self.block = data, sizes, block
        self.edges = [row * (len(data) - 1) // batch for row in range(batch + 1)]
        self.longest = max(end - start for start, end in zip(self.edges, self.edges[1:]))
        self.offset = 0

    def __iter__(self) -> EvalRows:
        return self

    def __next__(self) -> Batch:
        if self.offset >= self.longest:
            raise StopIteration
        width = min(self.block, self.longest - self.offset)
        starts = [min(start + self.offset, end) for start, end in zip(self.edges, self.edges[1:])]
        ends = [min(start + width, end) for start, end in zip(starts, self.edges[1:])]
        out = cut_rows(self.data, starts, ends, width, [self.offset == 0] * len(starts), self.sizes)
        self.offset += width
        return out

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offset = state["offset"]


def cut_rows(
    data: np.ndarray,
    starts: list[int],
    ends: list[int],
    width: int,
    fresh: list[bool],
    sizes: np.ndarray | None = None,
) -> Batch:
    """Rows of `width` tokens from each start; positions beyond a row's end are zero and not scored."""
    x, y = np.zeros((len(starts), width), np.int64), np.zeros((len(starts), width), np.int64)
    of_each = None if sizes is None else np.zeros((len(starts), width), np.int64)
    for row, (start, end) in enumerate(zip(starts, ends)):
        x[row, : end - start], y[row, : end - start] = data[start:end], data[start + 1 : end + 1]
        if of_each is not None and sizes is not None:
            of_each[row, : end - start] = sizes[start + 1 : end + 1]
    lengths = np.subtract(ends, starts)
    mask = np.arange(width) < lengths[:, None]
    counted = None if of_each is None else torch.from_numpy(of_each)
    return Batch(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(mask), torch.tensor(fresh), counted)


def check_rows(saved: int, now: int) -> None:
    if saved != now:
        raise ValueError(
            f"the saved place in the data has {saved} rows but the batch is {now}; resume with batch {saved}"
        )
