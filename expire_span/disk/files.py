"""Atomic writes of files, and JSON that is checked when it is read. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

from expire_span.errors import UserError, describe

SEAL = "checksum"
"""Field of a sealed JSON file that holds the sha256 of all its other fields."""


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_plain(path: Path) -> None:
    """Refuse a pipe or a device in place of a file: reading one may wait for ever, or never end."""
    kind = path.stat().st_mode
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # a folder is refused by whoever opens it
        raise OSError(errno.ENOTSUP, "it is not a plain file", str(path))


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """The checksum of a file's bytes in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` atomically: a reader, or a crash, sees the old content or the new, never a part.

    A link is replaced, not followed, so that a run folder from elsewhere cannot cause writes outside of it. Devices and pipes
    are refused, since a rename would replace them by a plain file.
    """
    if not path.name:
        raise UserError(f"{path} names no file to write; give a name")
    _check_replaceable(path)
    _sweep_earlier(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error  # a failed write does not name its file
    sync_folder(path.parent)


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a folder, a device or a pipe by a file."""
    if os.path.lexists(path) and not stat.S_ISREG(kind := path.lstat().st_mode) and not stat.S_ISLNK(kind):
        raise OSError(errno.EISDIR if stat.S_ISDIR(kind) else errno.ENOTSUP, "it is not a plain file", str(path))


def write_together(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    """Write several files of one result into a folder, made if need be: if one of them cannot be written, none is replaced."""
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in contents]
    for path in paths:
        _sweep_earlier(path)
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in paths]
    for path in paths:
        _check_replaceable(path)
    try:
        for place, data in zip(temporary, contents.values()):
            write_synced(place, data)
        for place, path in zip(temporary, paths):
            os.replace(place, path)
    except OSError:
        with contextlib.suppress(OSError):
            for place in temporary:
                place.unlink(missing_ok=True)
            if made:
                folder.rmdir()
        raise
    sync_folder(folder)
    return paths


def write_picture(path: Path, figure: Any, **options: Any) -> None:
    """Write a matplotlib figure as PNG, whole or not at all."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", **options)
    write_atomic(path, drawn.getvalue())


def check_output(path: Path) -> None:
    """Refuse an output file that cannot be written, before the work whose result it shall hold is done."""
    if not path.name:
        raise UserError(f"--out {path} names no file to write; give a name")
    if path.is_dir():
        raise UserError(f"--out {path} is a folder; give the name of a file in it")
    if not path.parent.is_dir():
        raise UserError(
            f"--out {path} lies in {path.parent}, and there is no such folder; make it, or give another name"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--out {path} cannot be written: permission was denied; give another name")


def write_output(path: Path, data: bytes) -> None:
    """Write an output file that the user named: a link is followed, and a device or a pipe is written to directly."""
    if path.exists() and not path.is_file() and not path.is_dir():
        with open(path, "wb") as file:
            file.write(data)
    else:
        write_atomic(path.resolve() if path.is_symlink() else path, data)


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """The JSON object in a file's content; anything else is refused in a sentence that names the file."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {error or 'it is nested too deeply'}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name} must hold a JSON table of fields, got {type(value).__name__}")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """The table of fields in a JSON file."""
    try:
        check_plain(path)
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {describe(error)}") from error
    return parse_json(data, str(path))


def seal(head: dict[str, Any]) -> dict[str, Any]:
    """The same fields with their checksum, so that a changed one is found when the file is read."""
    return {**head, SEAL: _digest(head)}


def check_seal(head: dict[str, Any], path: Path) -> None:
    """Refuse a sealed file whose fields do not match their checksum."""
    rest = {name: value for name, value in head.items() if name != SEAL}
    if head.get(SEAL) != _digest(rest):
        raise UserError(
            f"{path} does not match its checksum: it was damaged, or changed after it was written; "
            "restore it from a copy, or begin anew under another name"
        )


def seal_line(line: bytes) -> bytes:
    """A line of JSON, one table of fields, with a checksum of its bytes so far as its last field."""
    body = line.rstrip()[:-1]
    return body + _LINE_SEAL + _digest_line(body) + b'"}\n'


def check_line(fields: dict[str, Any], line: bytes, where: str) -> dict[str, Any]:
    """The fields of a line that `seal_line` wrote, without the checksum, which must match."""
    body, _, rest = line.rstrip().rpartition(_LINE_SEAL)
    if rest != _digest_line(body) + b'"}':
        raise UserError(
            f"{where} does not match its checksum: it was damaged, or changed after it was written; restore it from a copy"
        )
    return {name: value for name, value in fields.items() if name != SEAL}


_LINE_SEAL = f', "{SEAL}": "'.encode()


def _digest_line(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:16].encode()  # short, since there is one for each line


def _digest(fields: dict[str, Any]) -> str:
    plain = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(plain.encode()).hexdigest()


def sweep(folder: Path, pattern: str = ".*.tmp") -> None:
    """Delete the temporary files and folders of killed processes; those of living ones stay."""
    import shutil

    for path in folder.glob(pattern):
        if _is_dead(path):
            with contextlib.suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def sweep_own(folder: Path) -> None:
    """Delete the temporary files of an earlier process that had this one's number, as the first process of a container always
    has; for a process that has not written into the folder yet."""
    for path in folder.glob(f".*.{os.getpid()}.tmp"):
        path.unlink(missing_ok=True)


def _sweep_earlier(path: Path) -> None:
    """Delete what earlier processes that were killed while they wrote this file have left beside it."""
    sweep(path.parent, f".{glob.escape(path.name)}.*.tmp")


def _is_dead(path: Path) -> bool:
    """Whether the process that a temporary name ends with (.NAME.PID.tmp) is gone."""
    pid = path.name.split(".")[-2]
    if not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False
