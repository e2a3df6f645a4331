"""Retrofitted models: exact with real deletion, whatever `generate` does; detaching restores the model bit for bit."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.hf import ExpiringCache, RetrofitConfig, load_adapter, retrofit  # noqa: E402
from tests.error_budget import reordered  # noqa: E402
from tests.hf_models import FAMILIES, forgetful, tiny, tokens  # noqa: E402

ROUNDING = 1e-5
"""Logits of these models are below 10, so that float32 rounding of a few layers stays well below this."""


@torch.no_grad()
def stream(model, ids, cache, sizes, **options):
    parts = [model(x, past_key_values=cache, **options).logits for x in ids.split(sizes, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_untrained_it_is_the_base_model(family):
    model, ids = tiny(family), tokens(2, 90)
    with torch.no_grad():
        base = model(ids, use_cache=False).logits
        retrofitted = retrofit(model, RetrofitConfig(max_span=100, ramp=8))
        assert (model(ids, use_cache=False).logits - base).abs().max() < ROUNDING
        assert (stream(model, ids, retrofitted.new_cache(), [60] + [1] * 30) - base).abs().max() < ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_deletion_changes_nothing(family):
    """Read in one piece without a cache, nothing is deleted; streamed, most is."""
    model, ids = tiny(family), tokens(2, 260)
    retrofitted = forgetful(model)
    with torch.no_grad():
        undeleted = model(ids, use_cache=False).logits
        cache = retrofitted.new_cache()
        streamed = stream(model, ids, cache, [100] + [1] * 60 + [37, 63])
        assert (streamed - undeleted).abs().max() < ROUNDING
        stored = max(len(layer.memory.compact()) for layer in cache.layers)
        assert stored < 160, stored
        with retrofitted.paused():
            base = model(ids, use_cache=False).logits
        if retrofitted.predictors:  # forgetting matters, or the test would show nothing
            assert (undeleted - base).abs().max() > 100 * ROUNDING


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_not_seen(family):
    model, ids = tiny(family), tokens(2, 120)
    retrofitted = forgetful(model, max_span=60, ramp=8)
    mask = torch.ones_like(ids)
    mask[1, :45] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    cache, parts = retrofitted.new_cache(), []
    with torch.no_grad():
        for a, b in ((0, 50), (50, 51), (51, 120)):
            options = dict(attention_mask=mask[:, :b], position_ids=places[:, a:b])
            parts.append(model(ids[:, a:b], past_key_values=cache, **options).logits)
        padded = torch.cat(parts, 1)
        alone = model(ids[1:, 45:], use_cache=False).logits
    assert (padded[1, 45:] - alone[0]).abs().max() < ROUNDING


GENERATE = [("llama", how) for how in ("greedy", "sampling", "beams", "chunked")]
GENERATE += [("gemma3", "greedy"), ("gpt_neox", "beams"), ("gpt2", "chunked")]


@pytest.mark.parametrize(("family", "how"), GENERATE)
def test_generate_with_deletion_equals_generate_without_a_cache(family, how):
    model = tiny(family)
    retrofitted = forgetful(model, max_span=40, ramp=4)
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :11], ids[1, :11] = 0, 0
    options = dict(attention_mask=mask, max_new_tokens=20, pad_token_id=0, eos_token_id=None)
    options |= {
        "greedy": dict(do_sample=False),
        "sampling": dict(do_sample=True, temperature=0.8, top_k=20),
        "beams": dict(do_sample=False, num_beams=3),
        "chunked": dict(do_sample=False, prefill_chunk_size=16),
    }[how]
    cache = retrofitted.new_cache()
    torch.manual_seed(3)
    got = model.generate(ids, past_key_values=cache, **options)
    options.pop("prefill_chunk_size", None)
    torch.manual_seed(3)
    want = model.generate(ids, use_cache=False, **options)
    assert torch.equal(got, want)
    assert cache.get_seq_length() == 59 and min(int(x.min()) for x in cache.live()) < 40


def test_several_turns_go_on_from_one_cache():
    model, ids = tiny(), tokens(1, 30)
    retrofitted = forgetful(model, max_span=40, ramp=4)
    cache, options = (
        retrofitted.new_cache(),
        dict(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=None),
    )
    once = model.generate(ids, past_key_values=cache, **options)
    more = torch.cat([once, tokens(1, 12, seed=5)], 1)
    again = model.generate(more, past_key_values=cache, **options)
    assert torch.equal(again, model.generate(more, use_cache=False, **options))


def test_a_saved_cache_goes_on(tmp_path):
    model, ids = tiny(), tokens(2, 150)
    retrofitted = forgetful(model, max_span=40, ramp=4)
    cache = retrofitted.new_cache()
    stream(model, ids[:, :100], cache, [60, 40])
    cache.save(tmp_path / "cache.safetensors")
    other = retrofitted.new_cache().load(tmp_path / "cache.safetensors")
    assert other.get_seq_length() == 100
    assert torch.equal(stream(model, ids[:, 100:], cache, 50), stream(model, ids[:, 100:], other, 50))


def test_forks_are_independent():
    model, ids = tiny(), tokens(1, 90)
    retrofitted = forgetful(model, max_span=40, ramp=4)
    cache = retrofitted.new_cache()
    stream(model, ids[:, :60], cache, 60)
    fork = cache.fork(copies=3)
    ways = tokens(3, 30, seed=9)
    got = stream(model, ways, fork, [1] * 30)
    assert cache.get_seq_length() == 60
    for row in range(3):
        alone = model(torch.cat([ids[:, :60], ways[row : row + 1]], 1), use_cache=False).logits[0, 60:]
        assert (got[row] - alone).abs().max() < ROUNDING


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_output_attentions_are_weights_by_position(family):
    model, ids = tiny(family), tokens(2, 70)
    retrofitted = forgetful(model, max_span=30, ramp=4)
    with torch.no_grad():
        whole = model(ids, use_cache=False, output_attentions=True).attentions
        cache = retrofitted.new_cache()
        model(ids[:, :60], past_key_values=cache)
        late = model(ids[:, 60:], past_key_values=cache, output_attentions=True).attentions
    for before, after in zip(whole, late):
        assert after.shape == (2, 4, 10, 70)
        assert (before[:, :, 60:] - after).abs().max() < ROUNDING
        assert (after.sum(-1) - 1).abs().max() < ROUNDING
    assert float((late[1 if family == "gemma3" else 0] == 0).float().mean()) > 0.2  # what expired has no weight


def test_gradient_checkpointing_changes_no_gradient():
    model, ids = tiny(), tokens(2, 60)
    retrofitted = forgetful(model, max_span=30, ramp=8)
    gradients = []
    for checkpointing in (False, True):
        model.train()
        model.gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in retrofitted.parameters()])
        retrofitted.predictors.zero_grad()
    for plain, saved in zip(*gradients):
        assert plain.abs().max() > 0
        # Gradients of 120 tokens, through two layers forwards and backwards.
        assert (plain - saved).abs().max() <= reordered(120, depth=26, size=float(plain.abs().max()))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_is_the_same(backend):
    model, ids = tiny(), tokens(2, 48)
    forgetful(model, max_span=30, ramp=4)
    with torch.no_grad():
        eager = model(ids, use_cache=False).logits
        compiled = torch.compile(model, backend=backend)(ids, use_cache=False).logits
    assert (eager - compiled).abs().max() < ROUNDING


def test_packed_documents_do_not_see_each_other():
    model, ids = tiny(), tokens(1, 60)
    forgetful(model)
    places = torch.cat([torch.arange(25), torch.arange(35)]).unsqueeze(0)
    with torch.no_grad():
        packed = model(ids, position_ids=places, use_cache=False, output_attentions=True)
        alone = model(ids[:, 25:], use_cache=False).logits
    assert (packed.logits[:, 25:] - alone).abs().max() < ROUNDING
    assert not any(bool(weights[:, :, 25:, :25].any()) for weights in packed.attentions)


def stop_half_way(model, retrofitted, ids):
    """Let the second layer fail, as a GPU out of memory would; the cache is then refused."""

    def fail(*_):
        raise RuntimeError("out of memory")

    hook, cache = retrofitted.layers[1].module.register_forward_pre_hook(fail), retrofitted.new_cache()
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids, past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match="stopped half way"):
        model(ids, past_key_values=cache)


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_leaves_no_trace(family):
    model, ids = tiny(family), tokens(1, 20)
    implementation, state = model.config._attn_implementation, {k: v.clone() for k, v in model.state_dict().items()}
    base = model(ids, use_cache=False).logits
    retrofitted = forgetful(model)
    stop_half_way(model, retrofitted, ids)
    retrofitted.detach()
    assert model.config._attn_implementation == implementation
    assert {k: torch.equal(v, state[k]) for k, v in model.state_dict().items()} == dict.fromkeys(state, True)
    assert not any(module._forward_pre_hooks for module in model.modules()) and not hasattr(
        model, "_expire_span_retrofit"
    )
    assert torch.equal(model(ids, use_cache=False).logits, base)
    model.generate(ids, max_new_tokens=3, pad_token_id=0)  # with a cache of its own


def test_a_deep_copy_has_predictors_of_its_own():
    model, ids = tiny(), tokens(1, 60)
    base = model(ids).logits
    forgetful(model, max_span=20, ramp=4)
    want, twin = model(ids).logits, copy.deepcopy(model)
    assert torch.equal(twin(ids).logits, want)
    for x in twin._expire_span_retrofit.predictors.parameters():
        x.data.fill_(3.0)  # spans of nearly 20
    assert not torch.equal(twin(ids).logits, want) and torch.equal(model(ids).logits, want)
    twin._expire_span_retrofit.detach()
    assert torch.equal(twin(ids).logits, base) and torch.equal(model(ids).logits, want)


def test_a_model_whose_weights_are_offloaded(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    retrofitted, ids = forgetful(tiny(), max_span=20, ramp=4), tokens(1, 60)
    retrofitted.save(tmp_path / "adapter")
    offloaded = accelerate.cpu_offload(tiny(), execution_device="cpu")
    assert next(offloaded.parameters()).is_meta
    load_adapter(offloaded, tmp_path / "adapter")
    assert torch.equal(offloaded(ids).logits, retrofitted.model(ids).logits)
    plain: dict = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    retrofitted.steps_in_slots = True
    assert torch.equal(offloaded.generate(ids, **plain), retrofitted.model.generate(ids, **plain))


def test_beams_and_rows_of_a_cache_can_be_chosen():
    model, ids = tiny(), tokens(3, 50)
    retrofitted = forgetful(model, max_span=30, ramp=4)
    cache = retrofitted.new_cache()
    stream(model, ids, cache, 50)
    cache.batch_select_indices(torch.tensor([2, 0]))
    more = tokens(2, 10, seed=4)
    want = model(torch.cat([ids[[2, 0]], more], 1), use_cache=False).logits[:, 50:]
    assert (stream(model, more, cache, 10) - want).abs().max() < ROUNDING
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.bytes_held == 0
    assert isinstance(cache, ExpiringCache) and not cache.is_croppable and not cache.is_compileable
