"""Continuous batching: what a row writes, and the keys that it stores, are the same bits alone and among neighbours of other
ages that join and leave, in streams of decoders and of retrofitted models. Sums are taken in float64, so that their order,
which depends on the number of rows, does not count."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

from expire_span.store.slots import FRESH
from expire_span.stream import Stream
from expire_span.testing import small_config
from tests.exact_sums import SumsInFloat64
from tests.hf.test_endless import answer, half, keys_of
from tests.hf_models import tokens
from tests.stream.test_endless import DECODERS, advance, text
from tests.stream_cases import CASES, build

NAME = "batching"
NATIVE = (*DECODERS, *CASES, "sliding_window", "gru", "linear")
FAMILIES = ("llama", "qwen3", "gemma3", "gpt_neox")
KEPT = 3
"""First tokens that the retrofitted models keep, so that no prompt may be shorter."""
SIMPLE: dict[str, Any] = dict(
    seed=0, model="expiring", dtype="bfloat16", prompt=40, count=1, before=1, waited=0, changes=[]
)


def draw(rng: random.Random) -> dict[str, Any]:
    return dict(
        seed=rng.randrange(10**6),
        model=rng.choice(FAMILIES if rng.random() < 0.5 else NATIVE),
        dtype=rng.choice(["bfloat16", "bfloat16", "float16", "float32"]),
        prompt=rng.choice([1, 7, 40, 100]),
        count=rng.choice([1, 9, 34]),
        before=rng.choice([0, 1, 2]),
        waited=rng.choice([0, 3, 29, 60]),
        # step, and the length of a neighbour that joins then; 0 for one that leaves
        changes=[[rng.randrange(1, 30), rng.choice([0, 1, 5, 70])] for _ in range(rng.randint(0, 3))],
    )


@torch.inference_mode()
def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    is_native = case["model"] in NATIVE
    model = _model(case["model"], case["dtype"])
    if case["dtype"] == "float32":  # rounding to 24 bits shows the order of sums now and then, even of those in float64
        same = (_joins_native if is_native else _joins)(case, model)
    else:
        with SumsInFloat64():
            alone, busy = (
                _native(case, model, x) if is_native else _retrofitted(case, model, x) for x in (False, True)
            )
        assert torch.equal(alone[0], busy[0]), "logits depend on neighbours"
        same = alone[1] == busy[1]
    assert same, "stored keys depend on neighbours"


@cache
def _model(name: str, dtype: str) -> Any:
    kind = getattr(torch, dtype)
    if name not in NATIVE:
        return half(kind, name)
    config = DECODERS.get(name) or (name if name in CASES else small_config(name))
    return build(config).to(kind).requires_grad_(False)


def living_keys(stream: Stream, row: int) -> list[list[list[list[float]]]]:
    """Keys of a row's living memories, sorted, for each layer that keeps slots and each head."""
    found, column = [], stream._engine.clock.column
    for memory in stream._engine.stepper.memories:
        keys, alive = memory.slots.by_head(memory.slots.k)[row], memory.slots.left(column)[row] > 0
        alive[:, column:FRESH] = False
        found.append([sorted(own[lives].tolist()) for own, lives in zip(keys, alive)])
    return found


def _busy_stream(case: dict[str, Any], decoder: Any) -> Stream:
    """A stream whose row 0 has joined, after others had gone on for a while."""
    most = decoder.config.vocab
    stream = Stream(decoder, 3)
    stream.read([text(5 + 60 * n, n) % most for n in range(1 + case["before"])])
    advance(stream, case["waited"] + 1)
    stream.join(_prompt(case, decoder), row=0)
    return stream


def _prompt(case: dict[str, Any], decoder: Any) -> torch.Tensor:
    return text(case["prompt"], case["seed"]) % decoder.config.vocab


def _native(case: dict[str, Any], decoder: Any, busy: bool) -> tuple[torch.Tensor, Any]:
    stream = _busy_stream(case, decoder) if busy else Stream(decoder, 1)
    if not busy:
        stream.read([_prompt(case, decoder)])
    logits, joins = [stream.logits[:1]], dict(case["changes"]) if busy else {}
    for step in range(case["count"]):
        if joins.get(step):
            stream.join(text(joins[step], step) % decoder.config.vocab, row=1 + step % 2)
        logits.append(advance(stream, 1))
    return torch.cat(logits), living_keys(stream, 0)


def _retrofitted(case: dict[str, Any], retrofitted: Any, busy: bool) -> tuple[torch.Tensor, Any]:
    changes: dict[Any, Any] = {"before": [tokens(1, 5 + 60 * n, seed=n) for n in range(1 + case["before"] % 2)]}
    held = len(changes["before"])
    for step, length in sorted(dict(case["changes"]).items()):
        if step < case["count"] and 0 <= held + (1 if length else -1) <= 2:
            held += 1 if length else -1
            changes[step] = tokens(1, max(length, KEPT), seed=step) if length else None
    logits, keys = answer(retrofitted, _ids(case), case["count"], changes if busy else ())
    return logits, [[x.tolist() for x in layer] for layer in keys]


def _ids(case: dict[str, Any]) -> torch.Tensor:
    return tokens(1, max(case["prompt"], KEPT), seed=case["seed"])


def _joins_native(case: dict[str, Any], decoder: Any) -> bool:
    alone = Stream(decoder, 1)
    alone.read([_prompt(case, decoder)])
    return living_keys(alone, 0) == living_keys(_busy_stream(case, decoder), 0)


def _joins(case: dict[str, Any], retrofitted: Any) -> bool:
    """Whether the keys of a prompt are stored as they were read."""
    found = []
    for rows in (1, 2):
        stream = Stream(retrofitted, rows, static_shapes=True)
        if rows == 2:
            stream.join(tokens(1, 70, seed=7)[0], row=1)
            for _ in range(case["waited"]):
                stream.feed([0, 0])
        stream.join(_ids(case)[0], row=0)
        found.append([x.tolist() for layer in keys_of(stream.fork([0])) for x in layer])
    return found[0] == found[1]
