"""A quicker way to launch a kernel again: without Triton's search for the compiled version that fits the arguments.

At every call, `kernel[grid](...)` formats all its arguments into a key: with some thirty arguments that takes the host longer than the
GPU takes for a small kernel. Here the first launch goes that way, and the compiled kernel is cached under everything that its choice
depends on: the kernel, the device, every constant, each tensor's dtype and alignment, and the properties of each integer on which
Triton specialises. Later launches pass the arguments directly to Triton's own C launcher.

The C launcher's calling convention is private to Triton. So it is used only with the Triton version for which this was written; with
any other version, and in the interpreter, kernels are launched in Triton's public way.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KNOWN = triton.__version__.startswith("3.6.")
"""Whether this version's C launcher takes (grid, stream, function, metadata, hooks, all arguments with the constants last)."""
MOST = 1024
"""Number of compiled kernels kept; when it is exceeded, the table is emptied and filled again by the next launches."""
_INT32 = 2**31

_compiled: dict[tuple, tuple[Any, list]] = {}
_quick = True


def switch(on: bool) -> None:
    """Switch quick launches on or off, for benchmarks and tests."""
    global _quick
    _quick = on


def run_kernel(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)`, for kernels whose parameters are arguments first, then constants."""
    if not (_quick and KNOWN and type(kernel) is JITFunction) or kernel.pre_run_hooks:
        kernel[grid](*args, **constants)
        return
    device = driver.active.get_current_device()
    marks, values = signature(args)
    mode = knobs.runtime.debug, knobs.compilation.instrumentation_mode
    key = (id(kernel), device, mode, *marks, *constants, *constants.values())
    found = _compiled.get(key)
    if found is None:
        _keep(key, kernel, kernel[grid](*args, **constants), len(args), constants)
        return
    compiled, tail = found
    _run(compiled, grid, driver.active.get_current_stream(device), values + tail)


def signature(args: tuple) -> tuple[list, list]:
    """What the choice of a compiled kernel depends on, and the values to launch it with: addresses in place of tensors."""
    marks: list[Any] = []
    values = list(args)
    for n, x in enumerate(args):
        kind = type(x)
        if kind is int:
            wide = 0 if -_INT32 <= x < _INT32 else 64
            marks.append(1 if x == 1 else wide + (2 if x & 15 else 16))
        elif kind is float:
            marks.append(kind)
        elif isinstance(x, Tensor):
            values[n] = address = x.data_ptr()
            marks.append((x.dtype,) if address & 15 else x.dtype)
        elif kind is TensorDescriptor:
            marks.append((x.base.dtype, tuple(x.block_shape), x.padding))
        else:
            marks.append((kind, x))
    return marks, values


def _keep(key: tuple, kernel: Any, compiled: Any, count: int, constants: dict[str, Any]) -> None:
    """Cache a compiled kernel with its constants in the order of its parameters, if all constants come last, as `run_kernel` needs."""
    names = kernel.arg_names[count:]
    if compiled is None or not set(names) <= set(constants):
        return
    if len(_compiled) >= MOST:
        _compiled.clear()
    _compiled[key] = compiled, [constants[n] for n in names]


def _run(compiled: Any, grid: tuple[int, ...], stream: int, values: list) -> None:
    """Call the C launcher, with the profilers' hooks where any are installed."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    enter, leave = enter if _has_calls(enter) else None, leave if _has_calls(leave) else None
    about = compiled.launch_metadata(grid, stream, *values) if enter is not None else None
    size = (*grid, 1, 1)
    compiled.run(
        size[0], size[1], size[2], stream, compiled.function, compiled.packed_metadata, about, enter, leave, *values
    )


def _has_calls(hook: Any) -> bool:
    """Whether a hook would do anything: Triton installs empty chains of hooks, and calling one costs as much as a launch."""
    return hook is not None and bool(getattr(hook, "calls", True))
