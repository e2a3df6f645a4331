"""Downloads that can be interrupted, are checked, and may be requested by several processes at once.

A file is written to `NAME.part` and gets its name only after its length and checksum were found right. A second process waits
for the first and then finds the finished file. An interrupted download continues where it stopped.
"""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from expire_span.errors import StorageError, UserError
from expire_span.files import hash_file

CHUNK = 1 << 20
TIMEOUT = 60
"""Seconds without data after which a connection is closed."""
Report = Callable[[int, int | None], None]
"""Called with the bytes so far and the bytes in all (None where unknown)."""


@dataclass(frozen=True)
class Check:
    """Length and checksum that a file must have; None is not checked."""

    length: int | None = None
    sha256: str | None = None
    md5: str | None = None

    def fault_of(self, path: Path) -> str | None:
        """What is wrong with a file, in words; None where it is right."""
        size = path.stat().st_size
        if self.length is not None and size != self.length:
            return f"it has {size} bytes instead of {self.length}"
        for name in ("sha256", "md5"):
            wanted = getattr(self, name)
            found = hash_file(path, name) if wanted else None
            if found != wanted:
                return f"its {name} is {found} instead of {wanted}"
        return None


@contextmanager
def hold_lock(target: Path) -> Iterator[None]:
    """A lock, so that only one process at a time makes a file and the others wait. Without file locks, none waits.

    The lock file is deleted while the lock is still held, so that nothing is left beside the data.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    path = target.parent / f".{target.name}.lock"
    while True:
        with path.open("a") as lock:
            with suppress(ImportError, OSError):
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same_file(lock.fileno(), path):
                continue  # its holder has deleted it while we waited: lock the file that others lock now
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def fetch(url: str, target: Path, check: Check, report: Report = lambda done, total: None) -> Path:
    """Download a file, or continue an interrupted download; returns `target`, which only exists if it passed the check."""
    with hold_lock(target):
        if target.exists() and check.fault_of(target) is None:
            return target
        part = target.with_name(target.name + ".part")
        _download(url, part, report)
        fault = check.fault_of(part)
        if fault is not None:
            part.unlink()
            raise StorageError(f"the download of {url} is damaged: {fault}; it was deleted, run the command again")
        os.replace(part, target)
    return target


def _download(url: str, part: Path, report: Report) -> None:
    """Download the bytes after those that are already there."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            resumed = answer.status == 206
            have = have if resumed else 0  # a server that ignores the range sends everything again
            left = answer.headers.get("Content-Length")
            total = have + int(left) if left is not None else None
            _copy(answer, part, have, total, url, report)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: there are no bytes after those already downloaded; the check then decides
            raise StorageError(
                f"{url} answered {error.code} {error.reason}; try again, or give a local file with --from"
            ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        kept = part.stat().st_size if part.exists() else 0
        reason = getattr(error, "reason", error)
        raise StorageError(
            f"the download of {url} stopped after {kept} bytes ({reason}); the same command goes on from there"
        ) from error


def _copy(answer: http.client.HTTPResponse, part: Path, have: int, total: int | None, url: str, report: Report) -> None:
    with part.open("r+b" if have else "wb") as out:
        out.seek(have)
        while chunk := answer.read(CHUNK):
            out.write(chunk)
            have += len(chunk)
            report(have, total)
    if total is not None and have < total:
        raise StorageError(
            f"the download of {url} stopped after {have} of {total} bytes; the same command goes on from there"
        )


def open_source(source: str, folder: Path, check: Check, report: Report) -> Path:
    """A local file as it is, or a URL downloaded into a folder."""
    if "://" not in source:
        path = Path(source)
        if not path.exists():
            raise UserError(f"{source} does not exist; give an existing file or folder, or a URL, with --from")
        return path
    if not source.startswith(("http://", "https://")):
        raise UserError(f"{source} is neither a local file nor an http(s) URL")
    return fetch(source, folder / source.rstrip("/").rsplit("/", 1)[-1], check, report)
