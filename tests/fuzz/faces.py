"""All faces of the fuzzer. Triton's interpreter is switched on first: it must be, before any kernel is defined."""

from tests import triton_interpreter as _interpreter  # noqa: F401, I001

import torch

from . import batching, caches, checkpoints, layers, operator, streams
from .runner import Face, Tally, fuzz

FACES: list[Face] = [operator, layers, streams, batching, caches, checkpoints]  # type: ignore[list-item]


def select(names: list[str] | None) -> list[Face]:
    """The faces of these names, or all; computed with one thread each."""
    torch.set_num_threads(1)
    return [face for face in FACES if not names or face.NAME in names]


def fuzz_selected(names: list[str] | None, seconds: float, seed: str, first: bool) -> dict[str, Tally]:
    """What one worker does; other processes find it by its name, which they could not in a package's `__main__`."""
    return fuzz(select(names), seconds, seed, lambda words: print(words, flush=True), first)
