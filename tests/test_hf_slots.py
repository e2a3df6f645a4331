"""Decoding over slots equals decoding with the expiring cache for every family, while buffers grow and rows are replaced."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.hf import RetrofitConfig, retrofit  # noqa: E402
from expire_span.hf.decoding import RetrofitEngine  # noqa: E402
from expire_span.sampling import Sampling  # noqa: E402
from expire_span.store.slots import FRESH  # noqa: E402

from .hf_models import forgetful, read, tiny, tokens  # noqa: E402

GREEDY = Sampling(temperature=0)


@torch.no_grad()
def follow(engine, cache, ids):
    """The largest difference of logits over given tokens, and the largest logit."""
    worst = largest = 0.0
    for token in ids.T:
        engine.tokens.copy_(token)
        engine.advance(None)
        wanted = engine.handle.model(token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
        worst = max(worst, float((engine.logits - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return worst / largest


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma3", "mistral", "gpt_neox"])
def test_slots_equal_the_cache(family):
    handle = forgetful(tiny(family), max_span=100, ramp=16)
    cache, logits = read(handle, tokens(2, 70))
    engine = RetrofitEngine(handle, 2)
    engine.begin(cache, logits)
    assert follow(engine, cache, tokens(2, FRESH + 4, seed=5)) < 1e-5
    live = torch.stack([x.float().mean(1) for x in cache.live()])
    assert torch.equal(engine.live, live) and 0 < float(live.mean()) < 100


def test_slots_grow_and_positions_are_counted_anew():
    handle = forgetful(tiny(), max_span=200, ramp=16, seed=3)
    with torch.no_grad():
        for predictor in handle.predictors.values():
            predictor.bias.fill_(1.0)
    cache, logits = read(handle, tokens(1, 3))
    engine = RetrofitEngine(handle, 1, rebase_after=10)
    small = engine.bytes_held
    engine.begin(cache, logits)
    assert follow(engine, cache, tokens(1, 10 * FRESH, seed=6)) < 1e-5
    assert engine.bytes_held > small and engine.clock.now < cache.seen


def test_a_row_is_replaced_while_the_other_goes_on():
    handle = forgetful(tiny(), max_span=60, ramp=8)
    caches = [read(handle, tokens(1, n, seed=n)) for n in (40, 90)]
    both = read(handle, tokens(2, 25))
    engine = RetrofitEngine(handle, 2)
    engine.begin(*both)
    for _ in range(30):
        engine.advance(GREEDY, torch.Generator())
    engine.begin(caches[1][0].fork(), caches[1][1], rows=[0])
    alone = RetrofitEngine(handle, 1)
    alone.begin(caches[1][0], caches[1][1])
    for _ in range(FRESH):
        for each in (engine, alone):
            each.advance(GREEDY, torch.Generator())
        assert engine.tokens[0] == alone.tokens[0]
        assert (engine.logits[0] - alone.logits[0]).abs().max() < 1e-4
    twin = engine.selected(torch.tensor([1, 0]))
    for each in (engine, twin):
        each.advance(GREEDY, torch.Generator())
    assert torch.equal(twin.logits, engine.logits[[1, 0]])


def test_what_slots_refuse():
    with pytest.raises(ValueError, match="needs a model with rotary positions of any length, got gpt2"):
        RetrofitEngine(retrofit(tiny("gpt2"), RetrofitConfig(max_span=64, ramp=8)), 1)
    handle = forgetful(tiny())
    engine = RetrofitEngine(handle, 2)
    cache, logits = read(handle, tokens(1, 9))
    with pytest.raises(ValueError, match="2 rows need a cache with as many, got 1"):
        engine.begin(cache, logits)
    with pytest.raises(ValueError, match="one token of each row at a time, got 3"):
        handle.model(tokens(2, 3), past_key_values=engine.stepper.cache)
