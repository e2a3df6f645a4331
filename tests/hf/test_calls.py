"""Caches, masks and prompts that a retrofitted model would read wrongly are refused before anything is computed."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf import retrofit
from tests.hf_models import read, tiny, tokens


def test_a_cache_of_another_model_with_the_same_settings():
    """Its keys and values are the other model's. Copies of a cache, deep ones too, belong to the model of the original."""
    retrofitted, other = retrofit(tiny()), retrofit(tiny(seed=5))
    cache, _ = read(retrofitted, tokens(1, 9))
    said = "this cache was made by the retrofit of another model, or by an earlier one of this model; make one with new"
    for each in (cache, cache.fork(), retrofitted.new_cache()):
        with pytest.raises(ValueError, match=said):
            other.model(tokens(1, 5), past_key_values=each)
    for each in (cache.fork(), copy.deepcopy(cache), cache):
        retrofitted.model(tokens(1, 5), past_key_values=each)
    with pytest.raises(ValueError, match=said):
        copy.deepcopy(retrofitted.model)(tokens(1, 5), past_key_values=cache)
    again = retrofit(retrofitted.detach())
    with pytest.raises(ValueError, match=said):
        again.model(tokens(1, 5), past_key_values=cache)


@pytest.mark.parametrize("count", [2, 5, 7, 8])
def test_a_second_prompt_without_the_first(count):
    """Generate takes its input for all tokens so far, and drops as many as the cache has read."""
    model, ids = tiny(), tokens(1, 5)
    cache = retrofit(model).new_cache()
    model.generate(ids, past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match=r"no tokens beyond the 8 that the cache has read; give generate all tokens"):
        model.generate(tokens(1, count), past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    assert cache.seen == 8


@pytest.mark.parametrize("count", [5, 7, 8])
def test_a_second_prompt_without_the_first_that_has_a_mask(count):
    """Such masks cover fewer tokens than the cache has read, or as many as the new prompt has by chance."""
    model, ids, mask = tiny(), tokens(1, 5), torch.ones(1, count, dtype=torch.long)
    mask[:, 0] = 0  # transformers drops masks without padding
    cache = retrofit(model).new_cache()
    model.generate(ids, past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    with pytest.raises(ValueError, match=r"no tokens beyond the 8 that the cache has read; give generate all tokens"):
        model.generate(tokens(1, count), attention_mask=mask, past_key_values=cache, max_new_tokens=4, pad_token_id=0)
    assert cache.seen == 8


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_masks_that_are_not_1_and_0(family):
    """An additive mask of 0 and -inf would be read inverted, as transformers itself reads it."""
    model, ids, real = tiny(family), tokens(2, 6), torch.ones(2, 6)
    real[1, :2] = 0
    additive = torch.zeros(2, 6).masked_fill(real == 0, -torch.inf)
    base = model(ids, attention_mask=additive, use_cache=False).logits
    retrofitted = retrofit(model)
    want = model(ids, attention_mask=real.bool(), use_cache=False).logits
    for fine in (real, real.long(), real.half(), (additive == 0).long()):
        assert torch.equal(model(ids, attention_mask=fine, use_cache=False).logits, want)
    for wrong, got in ((additive, "-inf"), (1e4 * (real - 1), "-10000"), (2 * real.long(), "2"), (0 * real, "0 every")):
        with pytest.raises(
            ValueError, match=rf"must hold 1 for tokens and 0 for padding, got {got}.* give \(mask == 0"
        ):
            model(ids, attention_mask=wrong, use_cache=False)
    with pytest.raises(ValueError, match="got -inf"):
        model(ids, None, additive) if family == "gpt2" else model(ids, additive)
    with retrofitted.paused():
        assert torch.equal(model(ids, attention_mask=additive, use_cache=False).logits.nan_to_num(), base.nan_to_num())
