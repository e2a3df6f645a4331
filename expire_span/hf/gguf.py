"""The head of a GGUF file: its fields and the shapes of its tensors, with every length checked against the file's size; and
models whose weights were left in the file's blocks."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from expire_span.disk.files import check_plain
from expire_span.errors import UserError, describe

from .model_files import Shapes, check_sizes

FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Formats of plain values, by their number in the file."""
TEXT, LIST = 8, 9


class Damaged(ValueError):
    """The head of the file does not hold together."""


def check_gguf(path: Path) -> Shapes:
    """The shapes of a GGUF file's tensors; a damaged head, or sizes that do not fit the tensors, are refused."""
    try:
        check_plain(path)
        with open(path, "rb") as file:
            fields, shapes = _Reader(file, path.stat().st_size).head()
    except OSError as error:
        raise UserError(f"cannot read {path}: {describe(error)}") from error
    except (Damaged, struct.error, UnicodeDecodeError, OverflowError) as error:
        raise UserError(f"{path} is not a GGUF file that can be read ({error}); copy it again") from error
    kind = fields["general.architecture"]
    sizes = {name.removeprefix(f"{kind}."): value for name, value in fields.items() if not isinstance(value, list)}
    check_sizes(sizes, shapes, path)
    return shapes


def check_unpacked(model: Any) -> None:
    """Refuse a model that transformers has left in the blocks of its GGUF file."""
    rounding = getattr(getattr(model, "config", None), "quantization_config", None)
    if getattr(rounding, "quant_method", None) == "gguf" and not all(x.is_floating_point() for x in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} holds its weights in the blocks of a GGUF file, for kernels that compute a few "
            "tokens otherwise than many; load it with quantization_config=GgufConfig(dequantize=True)"
        )


class _Reader:
    """Reads a head from its beginning to its end. Lists become empty: no size is one."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.size = file, size

    def head(self) -> tuple[dict[str, Any], Shapes]:
        magic, version = self.file.read(4), self.value("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise Damaged(f"it must begin with GGUF and version 2 or 3, got {magic!r} and {version}")
        tensors, count = self.count(24), self.count(12)
        fields = {self.text(): self.field(self.value("<I")) for _ in range(count)}
        if not isinstance(fields.get("general.architecture"), str):
            raise Damaged("its field general.architecture must be text")
        shapes = dict(self.tensor() for _ in range(tensors))
        if sum(map(math.prod, shapes.values())) > 8 * self.size:  # no format takes less than a bit for a number
            raise Damaged(f"its tensors have more numbers than fit {self.size:,} bytes")
        return fields, shapes

    def value(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def count(self, least: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        number = self.value("<Q")
        if number * least > self.size - self.file.tell():
            raise Damaged(f"it ends before the {number:,} entries that it announces")
        return number

    def take(self, length: int) -> bytes:
        data = self.file.read(length)
        if len(data) < length:
            raise Damaged(f"it ends after {self.size:,} bytes, inside its head")
        return data

    def text(self) -> str:
        return self.take(self.count(1)).decode()

    def field(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self.skip(self.value("<I"))
        if kind not in FORMATS:
            raise Damaged(f"it has a field of type {kind}, which GGUF does not know")
        return self.value(FORMATS[kind])

    def skip(self, kind: int) -> list[Any]:
        if kind == TEXT:
            for _ in range(self.count(8)):
                self.take(self.count(1))
        elif kind in FORMATS:
            width = struct.calcsize(FORMATS[kind])
            self.file.seek(self.count(width) * width, 1)
        else:
            raise Damaged(f"it has a list of type {kind}, which GGUF does not know")
        return []

    def tensor(self) -> tuple[str, tuple[int, ...]]:
        name, dims = self.text(), self.value("<I")
        if dims > 4:
            raise Damaged(f"its tensor {name} has {dims} dimensions, more than 4")
        shape = tuple(self.value("<Q") for _ in range(dims))
        _, place = self.value("<I"), self.value("<Q")
        if place >= self.size:
            raise Damaged(f"it ends before its tensor {name}")
        return name, shape
