"""All faces of the fuzzer. Triton's interpreter is switched on first: it must be, before any kernel is defined."""

from tests import triton_interpreter as _interpreter  # noqa: F401, I001
from . import batching, caches, checkpoints, layers, operator, streams
from .runner import Face

FACES: list[Face] = [operator, layers, streams, batching, caches, checkpoints]  # type: ignore[list-item]
