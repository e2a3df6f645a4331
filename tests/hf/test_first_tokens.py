"""The first tokens of a context can be kept: as part of the function, so that deletion stays exact and memory bounded."""

import pytest
import torch

pytest.importorskip("transformers")

from expire_span import Sampling, Stream
from expire_span.hf import RetrofitConfig, load_adapter, retrofit
from expire_span.hf.attention import is_kept
from tests.hf_models import forgetful, tiny, tokens

ROUNDING = 1e-5
KEEP = 3


def short_lived(family="llama"):
    """Without keeping, nothing of the beginning would be left after 60 tokens."""
    return forgetful(tiny(family), max_span=50, ramp=8, keep_first=KEEP)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_streamed_with_deletion_they_stay_and_nothing_changes(family):
    """Left-padded too: the first tokens are those after the padding."""
    retrofitted, ids, mask = short_lived(family), tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
    mask[1, :30] = 0
    places, cache = (mask.cumsum(-1) - 1).clamp_min(0), retrofitted.new_cache()
    whole = retrofitted.model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    for start in range(0, 150, 25):
        end = start + 25
        options = dict(attention_mask=mask[:, :end], position_ids=places[:, start:end])
        part = retrofitted.model(ids[:, start:end], past_key_values=cache, **options).logits
        valid = mask[:, start:end].bool()
        assert (part - whole[:, start:end])[valid].abs().max() < ROUNDING
    for layer, found in zip(cache.layers, retrofitted.layers):
        if found.window is None:
            kept = is_kept(layer.memory.span)
            assert bool((kept.sum(-1) == KEEP).all()) and float(layer.memory.live(150).float().mean()) < 60
            for row, first in ((0, 0), (1, 30)):
                pos = layer.memory.pos.expand_as(kept)[row][kept[row]]
                assert pos.reshape(-1, KEEP).tolist() == [[first, first + 1, first + 2]] * len(kept[row])
    retrofitted.config = RetrofitConfig(max_span=50, ramp=8)
    assert (retrofitted.model(ids, use_cache=False).logits[0] - whole[0]).abs().max() > 100 * ROUNDING  # it matters


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("masks", ["of the new tokens", "of the first 50 tokens only"])
def test_masks_that_do_not_cover_all_tokens(family, masks):
    """A cache knows how many first tokens a row has, whatever the masks that came since: one row is padded beyond a chunk."""
    retrofitted, ids, mask = short_lived(family), tokens(3, 150), torch.ones(3, 150, dtype=torch.long)
    mask[1, :30], mask[2, :24] = 0, 0
    places, cache = (mask.cumsum(-1) - 1).clamp_min(0), retrofitted.new_cache()
    whole = retrofitted.model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    for start in range(0, 150, 25):
        part = slice(start, start + 25)
        own = None if masks == "of the first 50 tokens only" and start >= 50 else mask[:, part]
        options = dict(attention_mask=own, position_ids=places[:, part])
        got = retrofitted.model(ids[:, part], past_key_values=cache, **options).logits
        assert (got - whole[:, part])[mask[:, part].bool()].abs().max() < ROUNDING
        cache = cache.fork()


@torch.no_grad()
def test_packed_documents_have_first_tokens_each():
    retrofitted, ids = short_lived(), tokens(1, 120)
    places = torch.cat([torch.arange(70), torch.arange(50)]).unsqueeze(0)
    both = retrofitted.model(ids, position_ids=places, use_cache=False).logits
    for part in (slice(0, 70), slice(70, 120)):
        assert (retrofitted.model(ids[:, part], use_cache=False).logits - both[:, part]).abs().max() < ROUNDING


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_slots_keep_them(family):
    """Of prompts that are shorter than what is kept too, in rows that join others."""
    retrofitted, texts, ids = short_lived(family), [], tokens(2, 5)
    for static_shapes in (False, True):
        stream = Stream(retrofitted, 2, static_shapes=static_shapes)
        stream.join(ids[0])
        text = [int(step.tokens[0]) for step in stream.generate(Sampling(temperature=0), 20)]
        stream.join(ids[1, :1])
        next(stream.generate(Sampling(temperature=0), 1))
        stream = stream.fork([0, 1])
        text += [step.tokens.tolist() for step in stream.generate(Sampling(temperature=0), 150)]
        texts.append((text, stream.live.tolist()))
        for row in range(2):
            state = stream.snapshot(row).state
            kept = [
                is_kept(part["memory"].span).sum(-1) for part, x in zip(state, retrofitted.layers) if x.window is None
            ]
            assert all(bool((count == KEEP).all()) for count in kept)
    assert texts[0] == texts[1]


def test_learning_keeps_them_too():
    retrofitted = short_lived()
    cache, ids = retrofitted.new_cache(learning=True), tokens(2, 120)
    blocks = [retrofitted.model(part, past_key_values=cache).logits for part in ids.split(30, 1)]
    whole = retrofitted.model(ids, use_cache=False).logits
    assert (torch.cat(blocks, 1) - whole).abs().max() < ROUNDING
    assert all(int(is_kept(layer.last.span).sum()) == 2 * 2 * KEEP for layer in cache.layers)


def test_an_adapter_says_how_many(tmp_path):
    retrofitted = short_lived()
    retrofitted.save(tmp_path / "adapter")
    assert load_adapter(tiny(), tmp_path / "adapter").config.keep_first == KEEP
    with pytest.raises(ValueError, match="was made with keep_first 3, this retrofit has 0"):
        retrofit(tiny(), RetrofitConfig(max_span=50, ramp=8)).load(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"keep_first must lie in \[0, max_span\], got -1"):
        RetrofitConfig(keep_first=-1)
    with pytest.raises(ValueError, match="cap must leave room beside the 3 first tokens that are kept, got 3"):
        RetrofitConfig(keep_first=3, cap=3)
