"""Sums that do not depend on their order, for tests that compare to the last bit."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SumsInFloat64(TorchDispatchMode):
    """Products, sums and curved functions are computed in float64 and rounded once. In float32 sums depend on the order of
    summation, and so on the number of rows, on the width of the slots, and on the slot in which a memory lies; a curved
    function depends on whether a number lies in the part of a tensor that the processor computes in vectors or in the rest."""

    SUMS = ("mm", "addmm", "bmm", "baddbmm", "sum", "mean", "_softmax", "_scaled_dot_product")
    CURVED = (
        "gelu",
        "silu",
        "sigmoid",
        "softplus",
        "tanh",
        "exp",
        "erf",
        "log",
        "pow",
        "rsqrt",
        "sqrt",
        "reciprocal",
        "cos",
        "sin",
    )
    WHOLE = ("linear", "matmul", "scaled_dot_product", "rms_norm")  # as inference mode calls them

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if not name.startswith(self.SUMS + self.CURVED + self.WHOLE):
            return func(*args, **kwargs)
        floats = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if not floats:
            return func(*args, **kwargs)
        wide = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
        back = lambda x: x.to(floats[0].dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
        into = kwargs.pop("out", None)
        run = func if into is None else func.overloadpacket  # the variant that returns its result
        out = run(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()})
        if into is not None:
            return into.copy_(out)
        return tuple(map(back, out)) if isinstance(out, tuple) else back(out)
