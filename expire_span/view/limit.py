"""What if spans were shorter: clamp every span that a decoder predicts, for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from expire_span.models.decoder import Decoder

PREDICTOR = "span_predictor"
"""Name under which a memory system keeps the module that gives hidden states their spans."""


@contextlib.contextmanager
def limit_spans(decoder: Decoder, limit: float | None) -> Iterator[None]:
    """Within the block no memory gets a span above `limit`; afterwards, and after an error too, all is as before."""
    if limit is None:
        yield
        return
    if not limit >= 0:
        raise ValueError(f"the longest span must be 0 or more, got {limit}")
    found = [module for name, module in decoder.named_modules() if name.split(".")[-1] == PREDICTOR]
    if not found:
        raise ValueError(f"the memory system {decoder.config.mixer.kind} gives tokens no spans, so none can be cut")

    def clamp(module: object, args: object, span: Tensor) -> Tensor:
        return span.clamp(max=limit)

    hooks = [module.register_forward_hook(clamp) for module in found]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
