"""Fingerprints of a task's data, so that a resumed run does not continue with other data unnoticed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from expire_span.disk.files import hash_file
from expire_span.runs import RunFolder, UserError
from expire_span.settings.run import walk

WHOLE = 2**30
"""Files of up to this many bytes are read whole; of larger ones, PIECES pieces spread evenly over the file are read."""
PIECES, PIECE = 4096, 2**16


def find_fingerprint(task: Any, config: Any) -> dict[str, Any]:
    """The fingerprint of a task's data: the task's own (`task.fingerprint()`), or that of the files that its config names.

    It is empty for generated data, which follows from the config and the seed.
    """
    own = getattr(task, "fingerprint", None)
    if own is not None:
        return own()
    paths = [Path(value) for name, value in walk(config) if name == "path" and value]
    if not paths:
        return {}
    digest, size = hashlib.sha256(), 0
    for path in paths:
        for name, file in _files_of(path):
            size += file.stat().st_size
            digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
            _add_file(digest, file)
    tokenizer = getattr(config, "tokenizer", "")
    of_tokenizer = {"tokenizer": hash_file(Path(tokenizer))} if tokenizer else {}
    return {"sha256": digest.hexdigest(), "bytes": size, **of_tokenizer}


def check_fingerprint(run: RunFolder, now: dict[str, Any]) -> None:
    """Refuse to resume a run whose data has changed since it began"""
    if run.data and run.data != now:
        before, after = (
            f"{data.get('bytes', '?')} bytes, sha256 {data.get('sha256', '?'):.12}" for data in (run.data, now)
        )
        raise UserError(
            f"the data of run {run.path} has changed since it began (it was {before}, now {after}); "
            "put the first data back, or go on with the new data by --allow-changed-data True"
        )


def _files_of(path: Path) -> Iterator[tuple[str, Path]]:
    """All files below a folder with their relative names, sorted; or, for a file, that file with an empty name."""
    if path.is_file():
        yield "", path
        return
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        yield str(file.relative_to(path)), file


def _add_file(digest: Any, path: Path) -> None:
    size = path.stat().st_size
    with open(path, "rb") as file:
        if size <= WHOLE:
            while piece := file.read(2**20):
                digest.update(piece)
            return
        for n in range(PIECES):
            file.seek(n * (size - PIECE) // (PIECES - 1))
            digest.update(file.read(PIECE))
