"""Whether a module's weight may be read directly, in place of calling the module."""

from __future__ import annotations

from torch import nn


def are_plain(*modules: nn.Module) -> bool:
    """Whether each is a linear map of torch itself, without a bias, so that it is the product with its `weight` alone.

    An adapter that was put in its place (LoRA) has a `weight` too, that of the map inside it.
    """
    return all(type(module) is nn.Linear and module.bias is None for module in modules)
