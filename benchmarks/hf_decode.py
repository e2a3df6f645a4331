"""Time of a decoding step of a retrofitted model after a long context, for full caches and for expiring ones.

    full, static     transformers' StaticCache and its attention, the forward pass recorded as a CUDA graph
    full, slots      our slots and kernel with spans that never end, recorded: the same code without any expiry
    expire, slots    the adapter's spans, recorded
    expire, cache    the ExpiringCache, launched kernel by kernel

Each is checked first: the logits after the prompt's last token must be those of the cache that read the prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from expire_span.stream import Stream

STEPS = 256
ENDLESS = 1e4
"""A dial (factor of all spans) with which nothing expires."""


@torch.no_grad()
def decode_times(retrofitted: Any, ids: Tensor, chunk: int = 512) -> list[dict[str, Any]]:
    """Mean seconds of a step over STEPS steps after documents ids [B, n], one line for each kind of cache."""
    lines = []
    for name, measure in KINDS.items():
        torch.cuda.empty_cache() if ids.is_cuda else None
        try:
            line = measure(retrofitted, ids, chunk)
        except (RuntimeError, ValueError, AttributeError) as error:  # the other caches are still measured
            line = {"error": f"{type(error).__name__}: {error}"}
        lines.append({"cache": name, "rows": len(ids), "context": ids.shape[1], **line})
        print(lines[-1], flush=True)
    return lines


def _static(retrofitted: Any, ids: Tensor, chunk: int) -> dict[str, Any]:
    length = ids.shape[1] + STEPS + 16
    with retrofitted.paused() as model:
        cache = StaticCache(config=model.config, max_cache_len=length)
        logits = _fill(model, cache, ids[:, :-1], chunk)
        place = torch.full((1, 1), ids.shape[1] - 1, device=ids.device)
        token, every = ids[:, -1:].clone(), torch.arange(length, device=ids.device)

        def step() -> None:
            mask = (every <= place[0]).view(1, 1, 1, length)
            out = model(
                token, attention_mask=mask, position_ids=place, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            logits.copy_(out.logits[:, -1])
            place.add_(1)

        step()
        first = logits.clone()
        seconds = _time(_recorded(step, ids.device), ids.device)
    return {"seconds": seconds, "error_of_first": _error(first, _wanted(retrofitted, ids, chunk, full=True))}


def _slots(retrofitted: Any, ids: Tensor, chunk: int, dial: float = 1.0) -> dict[str, Any]:
    retrofitted.dial = dial
    try:
        stream = Stream(retrofitted, len(ids), static_shapes=True)
        stream.read(list(ids[:, :-1]))
        live = float(stream.live.mean())
        engine = stream._engine
        with torch.inference_mode():
            engine.tokens.copy_(ids[:, -1])
            engine.advance(None)
            first = engine.logits.clone()
            for _ in range(70):  # more than the 32 steps between compactions, so that everything has been recorded
                engine.advance(None)
            seconds = _time(lambda: engine.advance(None), ids.device)
        wanted = _wanted(retrofitted, ids, chunk, full=False)
    finally:
        retrofitted.dial = 1.0
    return {"seconds": seconds, "live": live, "bytes": stream.bytes_held, "error_of_first": _error(first, wanted)}


def _full_slots(retrofitted: Any, ids: Tensor, chunk: int) -> dict[str, Any]:
    return _slots(retrofitted, ids, chunk, ENDLESS)


def _plain(retrofitted: Any, ids: Tensor, chunk: int) -> dict[str, Any]:
    cache = retrofitted.new_cache()
    _fill(retrofitted.model, cache, ids, chunk)
    token = ids[:, -1:]
    step = lambda: retrofitted.model(token, past_key_values=cache, use_cache=True)  # noqa: E731
    return {"seconds": _time(step, ids.device, 32)}


KINDS: dict[str, Callable[[Any, Tensor, int], dict[str, Any]]] = {
    "full, static": _static,
    "full, slots": _full_slots,
    "expire, slots": _slots,
    "expire, cache": _plain,
}


def _fill(model: Any, cache: Any, ids: Tensor, chunk: int) -> Tensor:
    """Read ids [B, n]; the logits of the next token."""
    logits = torch.zeros(())
    for part in ids.split(chunk, 1):
        logits = model(part, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    return logits


def _wanted(retrofitted: Any, ids: Tensor, chunk: int, *, full: bool) -> Tensor:
    """Logits after the first two documents, computed with a cache that the test suite covers."""
    from transformers import DynamicCache

    if not full:
        return _fill(retrofitted.model, retrofitted.new_cache(), ids[:2], chunk)
    with retrofitted.paused() as model:
        return _fill(model, DynamicCache(config=model.config), ids[:2], chunk)


def _error(found: Tensor, wanted: Tensor) -> float:
    """Mean absolute difference divided by the standard deviation of the logits."""
    found = found[: len(wanted)].float()
    return float((found - wanted.float()).abs().mean() / wanted.float().std())


def _recorded(step: Callable[[], None], device: torch.device) -> Callable[[], Any]:
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _time(step: Callable[[], Any], device: torch.device, steps: int = STEPS) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    step()
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps
