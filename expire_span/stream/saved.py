"""Streams on disk: one safetensors file whose metadata holds the plain values and says which model it belongs to."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from expire_span.disk.files import check_plain, write_atomic
from expire_span.errors import StorageError, UserError, describe
from expire_span.store.tensor_files import check_tensors, to_bytes

FORMAT = 2


def write_saved(path: Path, fingerprint: str, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
    head = {"format": FORMAT, "model": fingerprint, **meta}
    plain = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items()}
    data = to_bytes(plain, {"stream": json.dumps(head)})
    try:
        write_atomic(path, data)
    except OSError as error:
        raise StorageError(
            f"the stream could not be saved to {path}: {describe(error)}; it goes on in memory, save it elsewhere"
        ) from error


def read_saved(path: Path, fingerprint: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        check_plain(path)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        with safetensors.safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            head = file.metadata() or {}
            meta = json.loads(head.get("stream", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        said = describe(error) if isinstance(error, OSError) else str(error).splitlines()[0]
        raise UserError(f"{path} is not a saved stream that can be read: {said}") from error
    meta = meta if isinstance(meta, dict) else {}
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{path} must be a saved stream of format {FORMAT}, got {meta.get('format', 'no stream')}; read the prompts again "
            "and save that stream"
        )
    if meta.get("model") != fingerprint:
        raise UserError(
            f"{path} was saved by another model (weights {meta.get('model')!s:.12}, these are {fingerprint[:12]}); "
            "load it with the model that wrote it"
        )
    check_tensors(path, tensors, head)
    return tensors, meta
