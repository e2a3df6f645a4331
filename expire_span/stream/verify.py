"""A check that deletion changes nothing: a stream that deletes is compared with one pass over all tokens without deletion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from expire_span.models import systems
from expire_span.models.decoder import Decoder
from expire_span.store.device_memory import check_fits

from .stream import Stream

MOST_TOKENS = 4096


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
def verify(decoder: Decoder, text: Sequence[int] | None = None, tokens: int | None = None) -> Verdict:
    """Stream tokens one by one, with deletion, and compare the logits with those of one pass without deletion.

    text: the tokens; None draws random ones. tokens: how many; None takes three times the longest life, up to `MOST_TOKENS`.
    """
    config = decoder.config
    fields = [
        systems.find(m.kind).receptive_field(systems.StateSize(config.shape(n), m)) for n, m in enumerate(config.mixers)
    ]
    wanted = tokens or min(MOST_TOKENS, 3 * max([r + 1 for r in fields if r is not None], default=256))
    device = decoder.embed.weight.device
    numbers = wanted * (config.vocab + len(config.mixers) * config.dim)
    check_fits(4 * numbers, f"one pass over {wanted:,} tokens", f"tokens {wanted:,}", device)
    drawn = torch.randint(config.vocab, (wanted,), generator=torch.Generator().manual_seed(0))
    data = drawn if text is None else torch.tensor(list(text[:wanted]), dtype=torch.int64)
    if len(data) < 2:
        raise ValueError(f"verifying needs at least 2 tokens, got {len(data)}")
    data = data.to(device)
    stream, found = Stream(decoder, 1), []
    stream.read([data[:1]])
    for token in data[1:, None]:
        found.append(stream.logits[0])
        stream.feed(token)
    found.append(stream.logits[0])
    whole = decoder(data[None], decoder.initial_state(1, "nothing"))[0][0]
    difference = float((torch.stack(found) - whole.float()).abs().max())
    largest = float(whole.abs().max())
    allowed = _tolerance(whole.dtype, device) * max(1.0, largest)
    return Verdict(len(data), difference, allowed, *_count(stream, len(data)))


def _tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """Difference that rounding explains, for logits of size 1."""
    if dtype != torch.float32:
        return 1e-2
    return 1e-5 if device.type == "cpu" else 1e-4


def _count(stream: Stream, tokens: int) -> tuple[int, int, int]:
    """Number of memories of all layers and heads that were written, deleted, and evicted while alive."""
    born = tokens * sum(live.shape[1] for live in stream.live_by_head)
    living = sum(int(live.sum()) for live in stream.live_by_head)
    return born, born - living, stream.evicted
