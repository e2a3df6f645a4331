"""A plugin for vLLM: its own engine and server, with memories that expire as the adapter of `expire-span retrofit` says.

vLLM calls `register` in every process, by the entry point `vllm.general_plugins`. The modules here know nothing of vLLM; those
of engine/ are written against it, and are imported only by it.
"""

from __future__ import annotations

import importlib
import logging

from .options import ARCHITECTURE

VERSIONS = ((0, 32), (0, 33))
"""The first version of vLLM that this works with, and the first after them."""


def register() -> None:
    """Make the architecture known to vLLM. Models of other architectures are served as without the plugin."""
    found: str = importlib.import_module("vllm").__version__
    release = tuple(int(x) for x in found.split("+")[0].split(".")[:2] if x.isdigit())
    if not VERSIONS[0] <= release < VERSIONS[1]:
        low, high = (".".join(map(str, x)) for x in VERSIONS)
        logging.getLogger("vllm").warning(
            "expire-span works with vLLM from %s up to, not including, %s, got %s: %s cannot be served",
            low,
            high,
            found,
            ARCHITECTURE,
        )
        return
    from .engine.registration import register_all

    register_all()
