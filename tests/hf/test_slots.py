"""Decoding over slots equals decoding with the expiring cache for every family, while buffers grow and rows are replaced."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.sampling import Sampling  # noqa: E402
from expire_span.store.slots import FRESH  # noqa: E402
from expire_span.stream import Stream  # noqa: E402
from tests.hf_models import forgetful, read, tiny, tokens  # noqa: E402

GREEDY = Sampling(temperature=0)


@torch.no_grad()
def follow(stream, cache, ids):
    """The largest difference of logits over given tokens, and the largest logit."""
    worst = largest = 0.0
    for token in ids.T:
        stream.feed(token)
        wanted = stream.model.model(token[:, None], past_key_values=cache, use_cache=True).logits[:, -1]
        worst = max(worst, float((stream.logits - wanted).abs().max()))
        largest = max(largest, float(wanted.abs().max()))
    return worst / largest


def over_slots(retrofitted, ids):
    """A stream over slots that has read the rows of ids [B, T]."""
    stream = Stream(retrofitted, len(ids), static_shapes=True)
    stream.read(list(ids))
    return stream


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma", "gemma3", "mistral", "gpt_neox"])
def test_slots_equal_the_cache(family):
    retrofitted = forgetful(tiny(family), max_span=100, ramp=16)
    cache, _ = read(retrofitted, tokens(2, 70))
    stream = over_slots(retrofitted, tokens(2, 70))
    assert stream.static_shapes
    assert follow(stream, cache, tokens(2, FRESH + 4, seed=5)) < 1e-5
    live = torch.stack([x.float().mean(1) for x in cache.live()])
    assert torch.equal(stream.live, live) and 0 < float(live.mean()) < 100


def test_slots_grow():
    retrofitted = forgetful(tiny(), max_span=200, ramp=16, seed=3)
    with torch.no_grad():
        for predictor in retrofitted.predictors.values():
            predictor.bias.fill_(1.0)
    cache, _ = read(retrofitted, tokens(1, 3))
    stream = over_slots(retrofitted, tokens(1, 3))
    small = stream.bytes_held
    assert follow(stream, cache, tokens(1, 10 * FRESH, seed=6)) < 1e-5
    assert stream.bytes_held > small


def test_a_row_is_replaced_while_the_other_goes_on():
    retrofitted = forgetful(tiny(), max_span=60, ramp=8)
    stream = over_slots(retrofitted, tokens(2, 25))
    list(stream.generate(GREEDY, 30))
    prompt = stream.prefill(tokens(1, 90, seed=90)[0])
    alone = Stream(retrofitted, 1, static_shapes=True)
    for each in (stream, alone):
        each.join(prompt, row=0)
    for mine, own in zip(stream.generate(GREEDY, FRESH), alone.generate(GREEDY, FRESH)):
        assert mine.tokens[0] == own.tokens[0]
        assert (stream.logits[0] - alone.logits[0]).abs().max() < 1e-4
    twin = stream.fork([1, 0])
    for each in (stream, twin):
        next(each.generate(GREEDY, 1))
    assert torch.equal(twin.logits, stream.logits[[1, 0]])


@pytest.mark.parametrize("keep_first", [0, 6])
def test_several_tokens_at_once_are_read_as_one_by_one(keep_first):
    """They go through the model in one call, with the memories taken out of the slots and put back."""
    retrofitted = forgetful(tiny(), max_span=60, ramp=8, keep_first=keep_first)
    ids, more = tokens(2, 4), tokens(2, 3 * FRESH, seed=3)
    whole = retrofitted.model(torch.cat([ids, more], 1), use_cache=False).logits[:, -1]
    for static_shapes in (False, True):
        stream = Stream(retrofitted, 2, static_shapes=static_shapes)
        stream.read(list(ids))
        stream.feed(more[:, :40])
        stream.feed(more[:, 40:45])
        stream.feed(more[:, 45:])
        assert (stream.logits - whole).abs().max() < 1e-5 * whole.abs().max()
        assert stream.position == 3 * FRESH


def test_what_slots_refuse():
    retrofitted = forgetful(tiny())
    stepper = retrofitted.for_stream().stepper(2)
    with pytest.raises(ValueError, match="one token of each row at a time, got 3"):
        retrofitted.model(tokens(2, 3), past_key_values=stepper.cache)
