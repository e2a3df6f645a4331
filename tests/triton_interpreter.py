"""Run the GPU kernels on the CPU: importing this before any kernel switches Triton's interpreter on.

With a GPU present nothing is switched, and the same tests run on it.
"""

from __future__ import annotations

import os

import torch

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"


def switch_on() -> None:
    """Triton reads the variable when a kernel is defined; its interpreter needs help with NumPy 2.4, see below."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        """Loop bounds are one-element arrays, which NumPy no longer turns into an int by itself."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not ON_GPU:
    switch_on()
