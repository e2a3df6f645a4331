"""The first tokens of a context can be kept: as part of the function, so that deletion stays exact and memory bounded."""

import pytest
import torch

pytest.importorskip("transformers")

from expire_span.hf import RetrofitConfig, Sampling, Stream, load_adapter, retrofit
from expire_span.hf.attention import is_kept
from expire_span.hf.decoding import RetrofitEngine

from .hf_models import forgetful, tiny, tokens

ROUNDING = 1e-5
KEEP = 3


def short_lived(family="llama"):
    """Without keeping, nothing of the beginning would be left after 60 tokens."""
    return forgetful(tiny(family), max_span=50, ramp=8, keep_first=KEEP)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_streamed_with_deletion_they_stay_and_nothing_changes(family):
    """Left-padded too: the first tokens are those after the padding."""
    handle, ids, mask = short_lived(family), tokens(2, 150), torch.ones(2, 150, dtype=torch.long)
    mask[1, :30] = 0
    places, cache = (mask.cumsum(-1) - 1).clamp_min(0), handle.new_cache()
    whole = handle.model(ids, attention_mask=mask, position_ids=places, use_cache=False).logits
    for start in range(0, 150, 25):
        end = start + 25
        options = dict(attention_mask=mask[:, :end], position_ids=places[:, start:end])
        part = handle.model(ids[:, start:end], past_key_values=cache, **options).logits
        valid = mask[:, start:end].bool()
        assert (part - whole[:, start:end])[valid].abs().max() < ROUNDING
    for layer, found in zip(cache.layers, handle.layers):
        if found.window is None:
            kept = is_kept(layer.memory.span)
            assert bool((kept.sum(-1) == KEEP).all()) and float(layer.memory.live(150).float().mean()) < 60
            for row, first in ((0, 0), (1, 30)):
                pos = layer.memory.pos.expand_as(kept)[row][kept[row]]
                assert pos.reshape(-1, KEEP).tolist() == [[first, first + 1, first + 2]] * len(kept[row])
    handle.config = RetrofitConfig(max_span=50, ramp=8)
    assert (handle.model(ids, use_cache=False).logits[0] - whole[0]).abs().max() > 100 * ROUNDING  # it matters


@torch.no_grad()
def test_packed_documents_have_first_tokens_each():
    handle, ids = short_lived(), tokens(1, 120)
    places = torch.cat([torch.arange(70), torch.arange(50)]).unsqueeze(0)
    both = handle.model(ids, position_ids=places, use_cache=False).logits
    for part in (slice(0, 70), slice(70, 120)):
        assert (handle.model(ids[:, part], use_cache=False).logits - both[:, part]).abs().max() < ROUNDING


def test_slots_keep_them_and_positions_are_counted_anew():
    """Prompts shorter than what is kept are read by the cache until they are long enough."""
    handle, texts = short_lived(), []
    for slots in (False, True):
        reader = Stream(handle, slots=slots, rebase_after=40)
        reader.read(tokens(2, 1))
        text = [token.tolist() for token in reader.write(200, Sampling(temperature=0))]
        texts.append((text, [x.tolist() for x in reader.cache.live()]))
        assert bool((is_kept(reader.cache.layers[0].memory.span).sum(-1) == KEEP).all()) and reader.cache.seen < 201
    assert texts[0] == texts[1]
    cache = handle.new_cache()
    logits = handle.model(tokens(1, 2), past_key_values=cache).logits[:, -1].detach()
    with pytest.raises(ValueError, match="first 3 tokens of a row are kept, but one of these rows has read 2"):
        RetrofitEngine(handle, 1).begin(cache, logits)


def test_learning_keeps_them_too():
    handle = short_lived()
    cache, ids = handle.new_cache(learning=True), tokens(2, 120)
    blocks = [handle.model(part, past_key_values=cache).logits for part in ids.split(30, 1)]
    whole = handle.model(ids, use_cache=False).logits
    assert (torch.cat(blocks, 1) - whole).abs().max() < ROUNDING
    assert all(int(is_kept(layer.last.span).sum()) == 2 * 2 * KEEP for layer in cache.layers)


def test_an_adapter_says_how_many(tmp_path):
    handle = short_lived()
    handle.save(tmp_path / "adapter")
    assert load_adapter(tiny(), tmp_path / "adapter").config.keep_first == KEEP
    with pytest.raises(ValueError, match="was made with keep_first 3, this retrofit has 0"):
        retrofit(tiny(), RetrofitConfig(max_span=50, ramp=8)).load(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"keep_first must lie in \[0, max_span\], got -1"):
        RetrofitConfig(keep_first=-1)
