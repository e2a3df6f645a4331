"""A check that deletion changes nothing: a stream that deletes is compared with one pass over all tokens without deletion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expire_span.store import ExpiringMemory
from expire_span.store.device_memory import check_fits

from .decoders import model_of
from .interface import StreamModel
from .prompts import check_prompt
from .stream import Stream


class Verdict(NamedTuple):
    """The result of `verify`; numbers of memories are sums over layers and heads."""

    tokens: int
    difference: float
    """Largest difference between the logits of the two."""
    allowed: float
    """Largest difference that rounding explains."""
    born: int
    deleted: int
    evicted: int
    """Memories that the cap deleted while they were alive: each is a departure from exactness."""


@torch.inference_mode()
def verify(
    model: Any,
    text: Sequence[int] | None = None,
    tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Verdict:
    """Stream tokens with deletion, and compare the logits with those of one pass without deletion.

    model: any that a Stream takes. The tokens with which its contexts begin are read at once, the others one by one.
    text: the tokens; None draws random ones. tokens: how many; None leaves it to the model. progress: called with the number
    of tokens that were streamed, and of all.
    """
    own = model_of(model)
    data = _choose_tokens(own, text, own.trial if tokens is None else tokens)
    whole, stream = own.undeleted(data[None])[0], Stream(model, 1)
    begun = max(1, min(len(own.beginning), len(data) - 1))
    stream.read([data[:begun]])
    differences = [_difference(stream, whole[begun - 1])]
    for n, (token, wanted) in enumerate(zip(data[begun:, None], whole[begun:]), start=begun + 1):
        stream.feed(token)
        differences.append(_difference(stream, wanted))
        progress(n, len(data))
    allowed = _tolerance(own, whole.dtype) * float(whole.abs().max())
    return Verdict(len(data), float(torch.stack(differences).max()), allowed, *_count(stream, len(data)))


def _choose_tokens(model: StreamModel, text: Sequence[int] | None, wanted: int) -> Tensor:
    """The first `wanted` tokens of a text, or of a context of random ones; refused where one pass over them cannot fit."""
    check_fits(wanted * model.token_bytes, f"one pass over {wanted:,} tokens", f"tokens {wanted:,}", model.device)
    if text is None:
        drawn = torch.randint(model.vocab, (wanted,), generator=torch.Generator().manual_seed(0)).tolist()
        text = [*model.beginning, *drawn[len(model.beginning) :]]
    if min(wanted, len(text)) < 2:
        raise ValueError(f"verifying needs at least 2 tokens, got {min(wanted, len(text))}")
    return check_prompt(text[:wanted], model.vocab)


def _difference(stream: Stream, wanted: Tensor) -> Tensor:
    return (stream.logits[0] - wanted.float()).abs().max()


def _tolerance(model: StreamModel, dtype: torch.dtype) -> float:
    """Difference that rounding explains, for a largest logit of 1."""
    if dtype != torch.float32:
        return 1e-2
    return model.rounding if model.device.type == "cpu" else 1e-4


def _count(stream: Stream, tokens: int) -> tuple[int, int, int]:
    """Number of memories of all layers and heads that were written, deleted, and evicted while alive."""
    counts = stream.live_by_head if stream.static_shapes else _count_stored(stream)
    born, living = tokens * sum(live.numel() for live in counts), sum(int(live.sum()) for live in counts)
    return born, born - living, stream.evicted


def _count_stored(stream: Stream) -> list[Tensor]:
    """Living memories of each layer of a stream without slots that keeps them one by one, [1, heads], or [1] for all heads."""
    memories = [part.get("memory") if isinstance(part, dict) else None for part in stream.snapshot(0).state]
    return [memory.live() for memory in memories if isinstance(memory, ExpiringMemory)]
