"""The GPU kernels for tests: on a GPU as they are; elsewhere in Triton's interpreter, on CPU tensors.

Whether a kernel is interpreted is decided when it is defined, so this must be imported before any kernel.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def _define_interpreted() -> None:
    if "triton" in sys.modules:
        raise RuntimeError("triton was imported before its interpreter could be switched on; import this module first")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton", reason="the kernels' tests need triton")
        from triton.runtime import interpreter

        import expire_span.ops.triton  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]
    _mend_scalars(interpreter)
    _mend_bfloat16(interpreter)


def _mend_scalars(interpreter) -> None:
    """Patch the interpreter: its loop bounds are one-element arrays, which NumPy 2.4 no longer converts to int."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _mend_bfloat16(interpreter) -> None:
    """Patch the interpreter: it holds bfloat16 as raw bits, and `dot` would multiply the bits; convert them to float first."""
    import triton.language as tl

    dot = interpreter.InterpreterBuilder.create_dot

    def widen(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def mended(self, a, b, *rest):
        return dot(self, widen(a), widen(b), *rest)

    interpreter.InterpreterBuilder.create_dot = mended


if ON_GPU:
    pytest.importorskip("triton", reason="the kernels' tests need triton")
else:
    _define_interpreted()

from expire_span.ops.triton import block_slots, compaction, launch, layout, lists, products, slot_tiles, slots, tuning  # noqa: E402

__all__ = [
    "DEVICE",
    "ON_GPU",
    "PAPER",
    "SMALL",
    "block_slots",
    "compaction",
    "launch",
    "layout",
    "lists",
    "products",
    "slot_tiles",
    "slots",
    "small_tiles",
    "tuning",
]

PAPER = {"include_self": False, "normalizer_eps": 1e-8}
"""What the paper's models ask of the operator, beside relative keys."""
SMALL = tuning.Tuning(16, tuning.Launch(32), tuning.Launch(32), tuning.Launch(16))
"""Tiles small enough that short rows have many of them."""


@pytest.fixture
def small_tiles(monkeypatch):
    """In the interpreter: small tiles and short life classes, so that short rows have several of each."""
    if ON_GPU:
        yield
        return
    import triton.language as tl

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(lists, "BLOCK", 64)
    monkeypatch.setattr(layout, "SHORTEST", 8)
    monkeypatch.setattr(lists, "FIRST_LIMIT", tl.constexpr(8))
    tuning.override(SMALL)
    yield
    tuning.override(None)
