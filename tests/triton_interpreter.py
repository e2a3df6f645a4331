"""The GPU kernels for tests: on a GPU as they are; elsewhere in Triton's interpreter, on CPU tensors.

Whether a kernel is interpreted is settled when it is defined, so this must be imported before any kernel is.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def _define_interpreted() -> None:
    if "triton" in sys.modules:
        pytest.skip("triton was imported before its interpreter could be switched on", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton", reason="the kernels' tests need triton")
        from triton.runtime import interpreter

        import expire_span.ops.triton  # noqa: F401
    finally:
        del os.environ["TRITON_INTERPRET"]
    _accept_numpy_scalars(interpreter)


def _accept_numpy_scalars(interpreter) -> None:
    """Loop bounds are one-element arrays there, which NumPy 2.4 no longer turns into an int by itself."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if ON_GPU:
    pytest.importorskip("triton", reason="the kernels' tests need triton")
else:
    _define_interpreted()
