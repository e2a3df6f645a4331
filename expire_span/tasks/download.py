"""Downloads that can be interrupted, are checked, and may be requested by several processes at once.

A file is written to `NAME.part` and gets its name only after its length and checksum were found right. A second process waits
for the first and then finds the finished file. An interrupted download continues where it stopped.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from expire_span.disk.files import check_plain, hash_file
from expire_span.errors import StorageError, UserError, describe

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
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            resumed = answer.status == 206
            have = have if resumed else 0  # a server that ignores the range sends everything again
            left = answer.headers.get("Content-Length", "")
            total = have + int(left) if left.isdecimal() else None
            _copy(answer, part, have, total, url, report)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # 416: there are no bytes after those already downloaded; the check then decides
            raise StorageError(
                f"{url} answered {error.code} {error.reason}; try again, or give a local file with --from"
            ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        kept = part.stat().st_size if part.exists() else 0
        if not kept:
            advice = "try again, or give another URL or a local file with --from"
            raise StorageError(f"{url} cannot be downloaded ({cause_of(error)}); {advice}") from error
        raise StorageError(
            f"the download of {url} stopped after {kept} bytes ({cause_of(error)}); the same command goes on from there"
        ) from error


def cause_of(error: Exception) -> str:
    """Why a server did not answer, or a download stopped, in words."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, OSError) and reason.errno is not None:
        return describe(reason)
    return str(reason) or type(error).__name__


def _copy(answer: http.client.HTTPResponse, part: Path, have: int, total: int | None, url: str, report: Report) -> None:
    with part.open("r+b" if have else "wb") as out:
        out.seek(have)
        while chunk := answer.read1(CHUNK):  # whatever has arrived, so that nothing is lost if we are stopped
            out.write(chunk)
            have += len(chunk)
            report(have, total)
    if total is not None and have < total:
        raise StorageError(
            f"the download of {url} stopped after {have} of {total} bytes; the same command goes on from there"
        )


@contextmanager
def open_source(source: str, target: Path, report: Report) -> Iterator[Path]:
    """A local file or folder as it is, or a URL downloaded beside the target.

    The download has a name of its own for every URL, so that no other is taken for it. It is deleted when it has been used or
    was found to be wrong; after any other failure, such as a full disk, it stays for the next attempt.
    """
    if "://" not in source:
        yield _local(source)
        return
    if not source.startswith(("http://", "https://")):
        raise UserError(f"{source} is neither a local file nor an http(s) URL")
    try:
        urllib.parse.urlsplit(source)
    except ValueError as error:
        raise UserError(f"{source} is not a URL ({error}); correct it, or give a local file") from error
    number = hashlib.sha256(source.encode(errors="replace")).hexdigest()[:8]
    path = fetch(source, target.with_name(f"{target.name}.{number}.download"), Check(), report)
    try:
        yield path
    except UserError:
        path.unlink()
        raise
    path.unlink()


def _local(source: str) -> Path:
    path = Path(source)
    if not source or not path.exists():
        named = source or "an empty name"
        raise UserError(f"{named} does not exist; give an existing file or folder, or a URL, with --from")
    check_plain(path)
    return path
