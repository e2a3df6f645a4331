"""Compressed files and archives of books. A damaged one ends in one sentence, and nothing half unpacked stays behind."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from expire_span.errors import StorageError, UserError, describe

from .download import CHUNK

_DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error, EOFError),
    RuntimeError,  # a zip file with a password, or packed in a way that Python cannot unpack
)
PACKINGS = {
    "zip": (b"PK\3\4", b"PK\5\6"),
    "xz": (b"\xfd7zXZ\0",),
    "gzip": (b"\x1f\x8b",),
    "bzip2": (b"BZh",),
    "zstd": (b"\x28\xb5\x2f\xfd",),
}
"""What compressed files begin with."""
_OPENERS = {"xz": lzma.open, "gzip": gzip.open, "bzip2": bz2.open}


def find_packing(path: Path) -> str | None:
    """How a file is compressed, by its first bytes; None if it is not."""
    with path.open("rb") as file:
        first = file.read(max(len(x) for begins in PACKINGS.values() for x in begins))
    return next((kind for kind, begins in PACKINGS.items() if first.startswith(begins)), None)


def unpack_file(packed: Path, source: str, out: IO[bytes], most: int | None) -> None:
    """Write the bytes of a file, or of the only file inside a compressed one; what it begins with tells how it is packed.

    Args:
        source: where the file came from, for messages.
        most: number of bytes after which to stop, so that a wrong source does not fill the disk; None takes all.
    """
    left = most
    with _as_one_sentence(source, "give the file itself or a .zip, .xz, .gz or .bz2 of it"), _open(packed) as stream:
        while chunk := stream.read(CHUNK if left is None else min(CHUNK, left)):
            out.write(chunk)
            left = None if left is None else left - len(chunk)


def _open(path: Path) -> IO[bytes]:
    kind = find_packing(path)
    if kind == "zip":
        return _open_zip(path)
    opener = None if kind is None else _OPENERS.get(kind)
    return path.open("rb") if opener is None else opener(path, "rb")  # type: ignore[return-value]


def _open_zip(path: Path) -> IO[bytes]:
    archive = zipfile.ZipFile(path)
    names = [name for name in archive.namelist() if not name.endswith("/")]
    if len(names) != 1:
        raise UserError(f"{path} holds {len(names)} files, expected 1; unpack it and give the file with --from")
    return archive.open(names[0])


def unpack_books(archive: Path, source: str, target: Path) -> None:
    """Only regular .txt files are unpacked, and none outside the target."""
    target.mkdir(parents=True)
    with _as_one_sentence(source, "give a folder, or a .tar, .tar.gz or .tar.xz"), tarfile.open(archive) as files:
        members = [m for m in files if m.isfile() and m.name.endswith(".txt")]
        files.extractall(target, members, filter="data")


def copy_books(folder: Path, target: Path) -> None:
    """Copy all .txt files below a folder."""
    for book in sorted(book for book in folder.rglob("*.txt") if not book.is_dir()):
        place = target / book.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(book, place)
        except OSError as error:  # a full disk names the source, and only the file that is made is lost
            raise StorageError(f"cannot copy {book} into {target.parent.parent}: {describe(error)}") from error


@contextmanager
def _as_one_sentence(source: str, advice: str) -> Iterator[None]:
    """Turn the many errors of a damaged file into one; those of the disk stay what they are."""
    try:
        yield
    except _DAMAGE as error:
        raise UserError(f"{source} cannot be unpacked ({_cause(error)}); {advice}") from error
    except OSError as error:
        if error.errno is not None and error.errno != 21:  # damage has no number; 21: it is a folder
            raise
        raise UserError(f"{source} cannot be unpacked ({_cause(error)}); {advice}") from error


def _cause(error: Exception) -> str:
    if isinstance(error, tarfile.ReadError) and "\n" in str(error):  # one line for each kind of archive that it is not
        return "it is no tar archive"
    if isinstance(error, IsADirectoryError):
        return "it is a folder, not a file"
    return str(error) or type(error).__name__
