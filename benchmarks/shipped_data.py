"""Builds the data of the model that ships: `python -m benchmarks.shipped_data ENWIK8 BOOKS --out data/shipped`.

ENWIK8 is the file (or an .xz of it), BOOKS a folder of .txt files (or a .tar.xz of one). The folder that is written holds
training, validation and test parts in this order, each of Wikipedia and of books, so that the recipe's shares (2% and 2%, from
the end) cut between them. Of the books, the 16th, 32nd ... by name are for validation, those after them for the test: no
book is in two parts.
"""

from __future__ import annotations

import argparse
import lzma
import tarfile
from pathlib import Path

SHARE = 0.02
"""Share of the bytes in validation and in test each, as in the recipe `shipped`."""
EVERY = 16
"""Of every 16 books, one is for validation and the next one for the test."""


def read_wiki(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()


def read_books(path: Path) -> dict[str, bytes]:
    """Content by name, sorted by name; an archive is read in memory and never unpacked to the disk."""
    if path.is_dir():
        return {book.name: book.read_bytes() for book in sorted(path.rglob("*.txt"))}
    with tarfile.open(path) as archive:
        found = {m.name: archive.extractfile(m) for m in archive if m.isfile() and m.name.endswith(".txt")}
        return dict(sorted((name, file.read()) for name, file in found.items() if file is not None))


def split_books(books: dict[str, bytes]) -> dict[str, bytes]:
    parts: dict[str, list[bytes]] = {"train": [], "valid": [], "test": []}
    for n, text in enumerate(books.values()):
        parts[{EVERY - 1: "valid", 0: "test"}.get(n % EVERY, "train") if n else "train"].append(text)
    return {name: b"\n\n".join(texts) for name, texts in parts.items()}


def cut(wiki: bytes, books: dict[str, bytes]) -> dict[str, bytes]:
    """The files by name. Validation and test are half Wikipedia, half books; what is left over of their parts is not used."""
    ends = [int(len(wiki) * share) for share in (0.9, 0.95)]
    train = wiki[: ends[0]], books["train"]
    held = int(sum(map(len, train)) * SHARE / (1 - 2 * SHARE) / 2)  # bytes of each half
    valid = wiki[ends[0] : ends[1]], books["valid"]
    test = books["test"], wiki[ends[1] :]  # books first: the sample that ships is then in the public domain
    short = min(map(len, (*valid, *test)))
    if short < held:
        raise SystemExit(f"validation and test need {held:,} bytes of each kind, got {short:,}; give more books")
    return {
        "1-train-wiki": train[0],
        "2-train-books": train[1],
        "3-valid-wiki": valid[0][:held],
        "4-valid-books": valid[1][:held],
        "5-test-books": test[0][:held],
        "6-test-wiki": test[1][:held],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("enwik8", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("--out", type=Path, default=Path("data/shipped"))
    options = parser.parse_args()
    files = cut(read_wiki(options.enwik8), split_books(read_books(options.books)))
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (options.out / name).write_bytes(data)
        print(f"{options.out / name}  {len(data):,} bytes")


if __name__ == "__main__":
    main()
