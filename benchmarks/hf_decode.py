"""Time of a decoding step of a retrofitted model after a long context: full cache and expiring cache."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import DynamicCache


@torch.no_grad()
def decode_times(handle: Any, context: int, batch: int, steps: int = 32) -> list[dict[str, Any]]:
    """Median seconds of a decoding step after `context` tokens, launched kernel by kernel."""
    model, rows = handle.model, []
    ids = torch.randint(model.config.vocab_size, (batch, context), device=model.device)
    with handle.paused():
        rows.append({"cache": "full", "seconds": _decode(model, DynamicCache(config=model.config), ids, steps)})
    rows.append({"cache": "expire", "seconds": _decode(model, handle.new_cache(), ids, steps)})
    for row in rows:
        print(row, flush=True)
    return rows


def _decode(model: Any, cache: Any, ids: torch.Tensor, steps: int) -> float:
    for part in ids.split(512, 1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    times = []
    for _ in range(steps):
        _wait(ids.device)
        began = time.perf_counter()
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        _wait(ids.device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
