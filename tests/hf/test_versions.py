"""Caches and streams of retrofitted models: going on with one changes no other, however it was made."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from expire_span import Sampling, Stream
from expire_span.hf import ExpiringCache
from expire_span.hf.retrofitted import Retrofit
from tests.hf_models import VOCAB, forgetful, tiny
from tests.models.test_state_versions import check_same, choose, held, held_by_stream

SEEDS = st.integers(0, 2**31)
QUICK = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def retrofitted() -> Retrofit:
    return forgetful(tiny(), max_span=60, ramp=4)


def held_by_cache(cache: ExpiringCache) -> dict[str, torch.Tensor]:
    return held([layer.memory for layer in cache.layers]) | {"seen": torch.tensor(cache.seen)}


@torch.no_grad()
def step_cache(retrofitted: Retrofit, cache: ExpiringCache, g: torch.Generator, path: Any) -> tuple[str, ExpiringCache]:
    """Go on with a cache, or make another from it."""

    def read() -> None:
        count = choose((1, 1, 30), g)
        retrofitted.model(torch.randint(VOCAB, (2, count), generator=g), past_key_values=cache)

    def take_over() -> ExpiringCache:
        """Another cache that is given this one's memories as they are."""
        twin = retrofitted.new_cache()
        for mine, theirs in zip(twin.layers, cache.layers):
            mine.seen, mine.memory = theirs.seen, theirs.memory
        return twin

    rows = torch.randint(2, (2,), generator=g)
    options = {
        "read": read,
        "reorder": lambda: cache.reorder_cache(rows.long()),  # type: ignore[arg-type]
        "select": lambda: cache.batch_select_indices(rows),
        "offload": lambda: [layer.offload() for layer in cache.layers],
        "to": lambda: cache.to("cpu"),
        "compact": lambda: cache.compact(),
        "fork": cache.fork,
        "copy": lambda: copy.copy(cache),
        "deepcopy": lambda: copy.deepcopy(cache),
        "state dict": lambda: (twin := retrofitted.new_cache()).load_state_dict(cache.state_dict()) or twin,
        "save": lambda: (cache.save(path), retrofitted.new_cache().load(path))[1],
        "take over": take_over,
    }
    name = "read" if torch.rand((), generator=g) < 0.4 else choose(options, g)
    made = options[name]()
    return name, made if isinstance(made, ExpiringCache) else cache


@QUICK
@given(SEEDS)
def test_no_cache_changes_another(retrofitted, tmp_path_factory, seed):
    g, path = torch.Generator().manual_seed(seed), tmp_path_factory.mktemp("caches") / "saved"
    caches, story = [retrofitted.new_cache()], []
    with torch.no_grad():
        retrofitted.model(torch.randint(VOCAB, (2, 20), generator=g), past_key_values=caches[0])
    copies = [held_by_cache(caches[0])]
    for _ in range(12):
        n = choose(range(len(caches)), g)
        name, made = step_cache(retrofitted, caches[n], g, path)
        story.append((n, name))
        if made is caches[n]:
            copies[n] = held_by_cache(made)
        else:
            caches.append(made)
            copies.append(held_by_cache(made))
        for cache, before in zip(caches, copies):
            check_same(held_by_cache(cache), before, story)


@pytest.mark.parametrize("static_shapes", [False, True])
@settings(QUICK, max_examples=2)
@given(SEEDS)
def test_no_stream_changes_another(retrofitted, static_shapes, tmp_path_factory, seed):
    g, path = torch.Generator().manual_seed(seed), tmp_path_factory.mktemp("streams") / "saved"
    streams, story = [Stream(retrofitted, 2, static_shapes=static_shapes)], []
    streams[0].read(list(torch.randint(VOCAB, (2, 20), generator=g)))
    copies = [held_by_stream(streams[0])]
    for _ in range(6):
        n = choose(range(len(streams)), g)
        stream, name = streams[n], choose(("feed", "generate", "generate", "join", "fork", "save"), g)
        story.append((n, name))
        if name in ("fork", "save"):
            stream.save(path)
            streams.append(stream.fork([0, 1]) if name == "fork" else Stream.load(retrofitted, path))
            copies.append(held_by_stream(streams[-1]))
        elif name == "feed":
            stream.feed(torch.randint(VOCAB, (2, choose((1, 9, 30), g)), generator=g))
        elif name == "join":
            stream.join(torch.randint(VOCAB, (choose((1, 30), g),), generator=g), row=choose(range(2), g))
        else:
            list(stream.generate(Sampling(seed=choose(range(3), g)), choose((1, 5, 34), g)))
        copies[n] = held_by_stream(stream)
        for other, before in zip(streams, copies):
            check_same(held_by_stream(other), before, story)
