"""Tensors in one safetensors file with a checksum over all of them and over the file's metadata."""

from __future__ import annotations

import hashlib
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from expire_span.errors import UserError

CHECKSUM = "sha256"
"""Name of the metadata entry that holds the checksum."""


def digest_tensors(tensors: dict[str, Tensor], head: dict[str, str] | None = None) -> str:
    """sha256 of the names, shapes, dtypes and numbers of tensors, and of metadata other than the checksum."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    for name, text in sorted((head or {}).items()):
        if name != CHECKSUM:
            digest.update(f"{name} {len(text)} {text}".encode())
    return digest.hexdigest()


def to_bytes(tensors: dict[str, Tensor], head: dict[str, str]) -> bytes:
    """A safetensors file of tensors on the CPU, with this metadata and their checksum."""
    return safetensors.torch.save(tensors, {**head, CHECKSUM: digest_tensors(tensors, head)})


def check_tensors(path: str | Path, tensors: dict[str, Tensor], head: dict[str, str]) -> None:
    """Refuse what does not match the checksum."""
    if digest_tensors(tensors, head) != head.get(CHECKSUM):
        raise UserError(
            f"{path} does not match its checksum: it was damaged, or changed after it was written; take another copy"
        )
