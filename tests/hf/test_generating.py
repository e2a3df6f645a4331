"""`generate`, pipelines and plain loops without a cache argument: with expiring memories, and over slots."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, pipeline

from expire_span import Sampling, Stream
from expire_span.hf.cache import ExpiringCache
from expire_span.hf.generating import SteppingCache
from tests.hf_models import FAMILIES, byte_tokenizer, forgetful, tiny, tokens

STEPS = 70
"""More than the fresh slots of an engine, so that slots are compacted on the way."""


@pytest.fixture(params=[False, True], ids=["plain", "slots"])
def retrofitted(request):
    retrofitted = forgetful(tiny(), max_span=40, ramp=8, keep_first=2)
    retrofitted.steps_in_slots = request.param
    return retrofitted


def generate(retrofitted, ids, **options):
    return retrofitted.model.generate(ids, **dict(max_new_tokens=16, do_sample=False, eos_token_id=None) | options)


def padded(ids, by):
    """The same rows with padding in front of the second one, in place of its first tokens, and their mask."""
    mask = torch.ones_like(ids)
    mask[1, :by] = 0
    return ids * mask, mask


def wanted(retrofitted, ids, **options):
    return generate(retrofitted, ids, past_key_values=retrofitted.new_cache(), **options)


def test_generate_takes_a_cache_of_its_own_and_gives_the_same_tokens(retrofitted, monkeypatch):
    ids, stepped = tokens(3, 50), []
    step = SteppingCache.step
    monkeypatch.setattr(SteppingCache, "step", lambda self, x: stepped.append(1) or step(self, x))
    found = generate(retrofitted, ids, return_dict_in_generate=True, max_new_tokens=STEPS)
    assert isinstance(found.past_key_values, ExpiringCache)
    assert len(stepped) == (STEPS - 1 if retrofitted.steps_in_slots else 0)
    assert found.sequences.equal(wanted(retrofitted, ids, max_new_tokens=STEPS))
    cache = found.past_key_values
    assert cache.seen == 50 + STEPS - 1 and max(int(x.max()) for x in cache.live()) < 60  # much of it was deleted


def test_the_tokens_are_those_of_a_stream(retrofitted):
    ids = tokens(2, 30)
    stream = Stream(retrofitted, rows=2, static_shapes=retrofitted.steps_in_slots)
    stream.read(list(ids))
    steps = [step.tokens for step in stream.generate(Sampling(temperature=0), max_tokens=16)]
    assert generate(retrofitted, ids)[:, 30:].equal(torch.stack(steps, 1))


def test_rows_with_padding(retrofitted):
    ids, mask = padded(tokens(2, 40), 17)
    found = generate(retrofitted, ids, attention_mask=mask)
    assert found.equal(wanted(retrofitted, ids, attention_mask=mask))
    alone = generate(retrofitted, ids[1:, 17:])
    assert found[1, 40:].equal(alone[0, 23:])


def test_a_row_shorter_than_its_kept_first_tokens(retrofitted):
    ids, mask = padded(tokens(2, 5), 4)
    assert generate(retrofitted, ids, attention_mask=mask).equal(wanted(retrofitted, ids, attention_mask=mask))


@pytest.mark.parametrize(
    "options", [dict(num_beams=3), dict(do_sample=True), dict(num_return_sequences=2, do_sample=True)]
)
def test_beams_and_samples(retrofitted, options):
    ids, few = tokens(2, 30), dict(max_new_tokens=12)
    torch.manual_seed(0)
    found = generate(retrofitted, ids, **few, **options)
    torch.manual_seed(0)
    assert found.equal(wanted(retrofitted, ids, **few, **options))


@torch.no_grad()
def test_a_loop_of_ones_own(retrofitted):
    model, ids = retrofitted.model, tokens(2, 30)
    out, found = model(ids, use_cache=True), []
    for _ in range(16):
        token = out.logits[:, -1:].argmax(-1)
        found.append(token)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
    assert torch.cat(found, 1).equal(generate(retrofitted, ids)[:, 30:])


@torch.no_grad()
def test_a_conversation_goes_on_with_many_tokens_after_single_ones(retrofitted):
    ids, more = tokens(2, 30), tokens(2, 9, seed=7)
    first = generate(retrofitted, ids, max_new_tokens=20, return_dict_in_generate=True)
    whole = torch.cat([first.sequences, more], 1)
    found = generate(retrofitted, whole, max_new_tokens=20, past_key_values=first.past_key_values)
    assert found.equal(wanted(retrofitted, whole, max_new_tokens=20))


@torch.no_grad()
def test_looking_at_a_cache_or_copying_it_changes_nothing(retrofitted):
    model, ids = retrofitted.model, tokens(2, 30)
    out, plain = model(ids, use_cache=True), retrofitted.new_cache()
    model(ids, past_key_values=plain, use_cache=True)
    cache = out.past_key_values
    for n, part in enumerate(tokens(2, 6, seed=4).split(1, 1)):
        logits = model(part, past_key_values=cache, use_cache=True).logits
        assert torch.allclose(logits, model(part, past_key_values=plain, use_cache=True).logits, atol=1e-4)
        if n == 2:
            assert [x.tolist() for x in cache.live()] == [x.tolist() for x in plain.live()]
            assert cache.fork().seen == cache.seen == 33 and cache.bytes_held > 0
    twin = cache.fork(2)
    assert model(tokens(4, 1), past_key_values=twin, use_cache=True).logits.shape[0] == 4


def test_single_tokens_may_follow_outside_inference_mode():
    retrofitted, ids = forgetful(tiny()), tokens(1, 20)
    retrofitted.steps_in_slots = True
    with torch.inference_mode():
        out = retrofitted.model(ids, use_cache=True)
        cache = retrofitted.model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True).past_key_values
    with torch.no_grad():
        for _ in range(3):
            retrofitted.model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert cache.seen == 24


def test_hidden_states_and_attentions_come_from_the_model_itself(retrofitted):
    more = dict(return_dict_in_generate=True, output_hidden_states=True, max_new_tokens=4)
    found = generate(retrofitted, tokens(1, 20), **more)
    assert len(found.hidden_states) == 4 and found.sequences.equal(
        generate(retrofitted, tokens(1, 20), max_new_tokens=4)
    )


SHORT = ("gemma3", "gpt2")


@pytest.mark.parametrize(
    "family", [x if x in SHORT else pytest.param(x, marks=pytest.mark.long) for x in sorted(FAMILIES)]
)
def test_every_family(family):
    retrofitted = forgetful(tiny(family), max_span=40, ramp=8)
    retrofitted.steps_in_slots = True
    ids = tokens(2, 40)
    assert generate(retrofitted, ids, max_new_tokens=8).equal(wanted(retrofitted, ids, max_new_tokens=8))


def test_a_pipeline_as_it_stands(retrofitted):
    config = retrofitted.model.config
    config.vocab_size, tokenizer = 97, byte_tokenizer()
    pipe = pipeline("text-generation", model=retrofitted.model, tokenizer=tokenizer, device="cpu")
    said = pipe("!!", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert said.startswith("!!")


def test_what_the_caller_asks_for_stays_so(retrofitted):
    with pytest.raises(ValueError, match="needs its own cache, got a StaticCache"):
        generate(retrofitted, tokens(1, 8), cache_implementation="static")
    with pytest.raises(ValueError, match="needs its own cache, got a DynamicCache"):
        filled = DynamicCache(config=retrofitted.model.config)
        with retrofitted.paused() as model:
            model(tokens(1, 8), past_key_values=filled, use_cache=True)
        generate(retrofitted, tokens(1, 12), past_key_values=filled)
    with retrofitted.paused() as model:
        assert isinstance(
            generate(retrofitted, tokens(1, 8), return_dict_in_generate=True).past_key_values, DynamicCache
        )
    assert generate(retrofitted, tokens(1, 8), use_cache=False, max_new_tokens=3).shape == (1, 11)


def test_a_cache_in_slots_belongs_to_its_model(retrofitted):
    first = generate(retrofitted, tokens(1, 20), max_new_tokens=4, return_dict_in_generate=True)
    other = forgetful(tiny(seed=3), max_span=40, ramp=8, keep_first=2)
    other.steps_in_slots = retrofitted.steps_in_slots
    with pytest.raises(ValueError, match="was made by the retrofit of another model"), torch.no_grad():
        other.model(tokens(1, 1), past_key_values=first.past_key_values, use_cache=True)


def test_it_can_be_turned_off_and_comes_off():
    model = tiny()
    before = dict(vars(model))
    retrofitted = forgetful(model, own_cache=False)
    with pytest.raises(ValueError, match="needs its own cache, got a DynamicCache"):
        generate(retrofitted, tokens(1, 8))
    retrofitted.detach()
    retrofitted = forgetful(model)
    assert "forward" in vars(model)
    retrofitted.detach()
    assert set(vars(model)) == set(before)
    assert isinstance(model(tokens(1, 8), use_cache=True).past_key_values, DynamicCache)


def test_a_deep_copy_generates_through_its_own_retrofit(retrofitted):
    twin = copy.deepcopy(retrofitted.model)
    ids = tokens(1, 20)
    found = twin.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True)
    assert found.past_key_values.maker() is twin._expire_span_retrofit is not retrofitted
    assert found.sequences.equal(generate(retrofitted, ids, max_new_tokens=6))


def test_a_replaced_forward_is_put_back():
    """accelerate sets a forward of its own on models that it spreads over devices."""
    model = tiny()
    own = model.forward
    object.__setattr__(model, "forward", own)
    forgetful(model).detach()
    assert vars(model)["forward"] is own


def engines_of(retrofitted, monkeypatch):
    """The engines that caches enter from now on, in order."""
    found, enter = [], SteppingCache.enter_slots
    monkeypatch.setattr(SteppingCache, "enter_slots", lambda self, *x: (enter(self, *x), found.append(self.engine))[0])
    retrofitted.steps_in_slots = True
    return found


def test_slots_are_the_default_of_generate_and_of_streams(monkeypatch):
    retrofitted = forgetful(tiny())
    assert retrofitted.steps_in_slots is None and Stream(retrofitted, rows=1).static_shapes
    engines = engines_of(retrofitted, monkeypatch)
    retrofitted.steps_in_slots = None
    generate(retrofitted, tokens(1, 20), max_new_tokens=4)
    assert len(engines) == 1


def test_memories_that_would_move_at_every_step_stay_out_of_slots(monkeypatch):
    """Beams are put in another order after each step, which only layers can do."""
    retrofitted, ids = forgetful(tiny(), max_span=40, ramp=8, keep_first=2), tokens(2, 30)
    engines, options = engines_of(retrofitted, monkeypatch), dict(num_beams=3, max_new_tokens=12)
    found = generate(retrofitted, ids, **options)
    assert len(engines) == 2 and found.equal(wanted(retrofitted, ids, **options))
    with torch.no_grad():  # looking now and then keeps them in
        cache = retrofitted.model(ids, use_cache=True).past_key_values
        for n in range(12):
            retrofitted.model(ids[:, :1], past_key_values=cache, use_cache=True)
            if n % 2:
                cache.live()
    assert len(engines) == 2 + 6


def test_an_answer_uses_the_engine_that_the_last_one_left(monkeypatch):
    retrofitted = forgetful(tiny(), max_span=40, ramp=8, keep_first=2)
    engines = engines_of(retrofitted, monkeypatch)
    for seed, length in (
        (1, 60),
        (2, 9),
        (3, 30),
    ):  # a later one is also shorter, and the slots hold more than it needs
        ids = tokens(2, length, seed=seed)
        assert generate(retrofitted, ids, max_new_tokens=STEPS).equal(wanted(retrofitted, ids, max_new_tokens=STEPS))
    assert len(engines) == 3 and len({id(x) for x in engines}) == 1  # each answer moved into slots once
    with torch.no_grad():
        out = retrofitted.model(ids, use_cache=True)
        retrofitted.model(ids[:, :1], past_key_values=out.past_key_values, use_cache=True)
        assert generate(retrofitted, ids).equal(
            wanted(retrofitted, ids)
        )  # while the first answer's cache is still in use
    assert engines[-1] is not engines[-2] is out.past_key_values.engine


@torch.no_grad()
def test_no_engine_outlives_what_it_was_made_for(monkeypatch):
    retrofitted = forgetful(tiny(), max_span=40, ramp=8, keep_first=2)
    engines, ids = engines_of(retrofitted, monkeypatch), tokens(2, 30)
    generate(retrofitted, ids)
    retrofitted.dial = 0.3
    assert generate(retrofitted, ids).equal(wanted(retrofitted, ids)) and engines[-1] is not engines[-2]
    for x in retrofitted.parameters():
        x.mul_(-1)
    assert generate(retrofitted, ids).equal(wanted(retrofitted, ids)) and engines[-1] is not engines[-2]
    generate(retrofitted, ids[:1])
    assert engines[-1].rows == 1
    copied = copy.deepcopy(retrofitted.model)
    copied._expire_span_retrofit.steps_in_slots = True
    assert (
        generate(copied._expire_span_retrofit, ids[:1]).equal(generate(retrofitted, ids[:1]))
        and engines[-2] is not engines[-1]
    )
